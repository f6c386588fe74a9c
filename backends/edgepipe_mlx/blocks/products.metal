// Products of rows with weights of GGUF's K types at their own size.
//
// A row of a weight is cut into blocks of 256 inputs, and each block into groups of GROUP inputs:
//
//     value = base * factor * (code - ZERO)                       without ADDED
//     value = base * factor * code + base' * factor'              with ADDED
//
// Codes lie in one stream of BITS bits each, the first in the lowest bits, as mx.quantize packs them. Of a block come
// GROUPS factors (with ADDED, as many factors' behind them), and one base (with ADDED, base' behind it).
//
// A simdgroup computes FEATURES out features of ROWS rows. Its lanes take 16 inputs each: 16 lanes one block, the other
// 16 the next one. Sums are float32 and in the same order whatever ROWS is, so a row does not depend on its neighbours.

constant constexpr int BLOCK_INPUTS = 256;
constant constexpr int SHARE_INPUTS = 16;  // of a lane
constant constexpr int BLOCK_LANES = 16;   // that share a block

template <int BITS>
float code_at(const thread ushort *parts, int index) {
    const int bit = BITS * index, place = bit / 16, shift = bit % 16;
    uint code = uint(parts[place]) >> shift;
    if (shift + BITS > 16) code |= uint(parts[place + 1]) << (16 - shift);
    return float(code & ((1u << BITS) - 1u));
}

// x [rows, inputs], y [rows, stride]; codes, factors and bases from the first of ``features`` out features on.
template <int BITS, int GROUP, int ADDED, int ZERO, int ROWS, int FEATURES, typename X, typename F, typename Y>
void multiply_blocks(
    const device X *x,
    const device ushort *codes,
    const device F *factors,
    const device half *bases,
    device Y *y,
    int inputs,
    int rows,
    int features,
    int stride,
    int lane) {
    constexpr int GROUPS = BLOCK_INPUTS / GROUP, KINDS = 1 + ADDED;
    const int blocks = inputs / BLOCK_INPUTS, share = lane % BLOCK_LANES, group = share * SHARE_INPUTS / GROUP;
    float sums[FEATURES][ROWS];
    #pragma unroll
    for (int feature = 0; feature < FEATURES; feature++)
        #pragma unroll
        for (int row = 0; row < ROWS; row++) sums[feature][row] = 0.0f;
    for (int block = lane / BLOCK_LANES; block < blocks; block += 2) {
        float values[ROWS][SHARE_INPUTS], totals[ROWS];
        #pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const device X *from = x + metal::min(row, rows - 1) * inputs + block * BLOCK_INPUTS + share * SHARE_INPUTS;
            totals[row] = 0.0f;
            #pragma unroll
            for (int index = 0; index < SHARE_INPUTS; index++) {
                values[row][index] = float(from[index]);
                totals[row] += values[row][index];
            }
        }
        #pragma unroll
        for (int feature = 0; feature < FEATURES; feature++) {
            const int place = metal::min(feature, features - 1) * blocks + block;
            const device ushort *from = codes + place * (BLOCK_INPUTS * BITS / 16) + share * BITS;
            ushort parts[BITS];
            #pragma unroll
            for (int index = 0; index < BITS; index++) parts[index] = from[index];
            const device F *factor = factors + place * (GROUPS * KINDS) + group;
            const device half *base = bases + place * KINDS;
            const float scale = float(base[0]) * float(factor[0]);
            float offset = -scale * float(ZERO);
            if (ADDED) offset = float(base[KINDS - 1]) * float(factor[GROUPS * (KINDS - 1)]);
            #pragma unroll
            for (int row = 0; row < ROWS; row++) {
                float dot = 0.0f;
                #pragma unroll
                for (int index = 0; index < SHARE_INPUTS; index++)
                    dot = metal::fma(code_at<BITS>(parts, index), values[row][index], dot);
                sums[feature][row] = metal::fma(scale, dot, metal::fma(offset, totals[row], sums[feature][row]));
            }
        }
    }
    #pragma unroll
    for (int feature = 0; feature < FEATURES; feature++)
        #pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const float sum = metal::simd_sum(sums[feature][row]);
            if (lane == 0 && feature < features && row < rows) y[row * stride + feature] = Y(sum);
        }
}
