// Attention of single rows over pages, in two passes over a row's keys: parts of them, then the sum of the parts.
//
// It serves heads that FlashAttention-2 excludes: larger ones, values that are the first numbers of their keys, and
// capped logits; and all heads where torch's kernel reads no pages. HEAD_DIM is a multiple of 32, VALUE_DIM is 64 or a
// multiple of 128, a page's tokens are a multiple of TILE_KEYS.
//
// KV_BITS is 16 for bf16, or 8 for int8 codes with a float16 scale for each key and each value. Codes become bf16 without
// rounding. A key's scale multiplies its logits, a value's scale its weights.
//
// A block takes a part of a row's keys, and up to HEADS query heads of one kv head. For each tile of keys,
//   1. warp w multiplies all heads with keys 8w to 8w + 7, and shares each head's highest logit,
//   2. it turns its logits to weights, which go to shared memory in bf16,
//   3. it multiplies all weights with its eighth of the values' numbers.
// So a block's warps read each number of a key or a value once, as operands of tensor cores. Operands hold dimensions and
// keys in an order that lets a lane read 16 bytes at once; a sum does not depend on it.

#define TILE_KEYS 64
#define HEADS (16 * HEAD_TILES)
#define QUERY_PITCH (HEAD_DIM % 64 ? HEAD_DIM : HEAD_DIM + 32)  // rows of odd multiples of 64 bytes: see ``logits_of``
#define WEIGHT_PITCH (TILE_KEYS + 16)
#define LANE_DIMS (VALUE_DIM / WARPS / 8)  // numbers of a value that a lane reads
#define LANE_WORDS ((LANE_DIMS * KV_BITS + 31) / 32)  // words that hold them

#if KV_BITS == 8
typedef u8 Kept;
#else
typedef u16 Kept;
#endif

struct Sequences {
    const u16 *queries;  // [.., heads, HEAD_DIM], ``query_stride`` from row to row
    const Kept *keys;    // [pages, page_tokens, kv heads, HEAD_DIM], ``token_stride`` from token to token
    const Kept *values;  // [pages, page_tokens, kv heads, VALUE_DIM], strides as those of keys
    const int *rows;     // [R] places in queries and out
    const int *lengths;  // [R] keys up to each row's own; 0: the row is left alone
    const int *tables;   // [R, table_width] pages
    const float *sinks;  // [heads], or null
    u16 *out;            // [.., heads, VALUE_DIM], ``out_stride`` from row to row
    float *sums;         // [R, heads, parts, VALUE_DIM] of values by weights
    float *totals;       // [R, heads, parts, 2]: the highest logit, and the sum of weights relative to it
    int query_stride;
    int token_stride;
    int out_stride;
    int heads;
    int kv_heads;
    int page_tokens;
    int table_width;
    int window;  // keys that a row sees; 0: all
    int parts;
    float scale;
    float softcap;  // 0: none
};

// Of codes. They are apart from ``Sequences``, with which large heads in bf16 would take more registers than there are.
struct Scales {
    const u16 *keys;    // [pages, page_tokens, kv heads], ``stride`` from token to token
    const u16 *values;  // as keys
    int stride;
};

// The keys [low, high) that a row sees, and the tiles [first, end) that a part takes of them.
struct Part {
    int low;
    int high;
    int first;
    int end;
};

DEVICE Part part_of(const Sequences &given, int row, int part) {
    const int high = given.lengths[row], low = given.window && high > given.window ? high - given.window : 0;
    const int begin = low / TILE_KEYS, end = (high + TILE_KEYS - 1) / TILE_KEYS;
    int each = (end - begin + given.parts - 1) / given.parts;
    if (each < HEAD_TILES) each = HEAD_TILES;  // a part writes as many bytes as HEAD_TILES tiles have, or fewer
    const int first = begin + part * each;
    return {low, high, first, first + each < end ? first + each : end};
}

// Two codes, the lower bytes of a word's halves, as bf16: 128 and seven bits, less 128 or, of negative codes, 256.
DEVICE u32 codes_as_bf16(u32 bytes) {
    const u32 raised = masked_or(bytes, 0x007F007Fu, 0x43004300u), taken = masked_or(bytes, 0x00800080u, 0xC300C300u);
    return fma_bf16_pair(raised, 0x3F803F80u, taken);
}

// The LANE_DIMS numbers of a value from an address that is a multiple of their size, or of its largest power of two.
DEVICE void load_numbers(u32 (&to)[LANE_WORDS], const Kept *from) {
    constexpr int bytes = LANE_DIMS * KV_BITS / 8;
    if constexpr (bytes % 16 == 0) {
        for (int word = 0; word < LANE_WORDS; word += 4) {
            const uint4 found = reinterpret_cast<const uint4 *>(from)[word / 4];
            to[word] = found.x, to[word + 1] = found.y, to[word + 2] = found.z, to[word + 3] = found.w;
        }
    } else if constexpr (bytes % 8 == 0) {
        for (int word = 0; word < LANE_WORDS; word += 2) {
            const uint2 found = reinterpret_cast<const uint2 *>(from)[word / 2];
            to[word] = found.x, to[word + 1] = found.y;
        }
    } else if constexpr (bytes % 4 == 0) {
        for (int word = 0; word < LANE_WORDS; word++) to[word] = reinterpret_cast<const u32 *>(from)[word];
    } else if constexpr (bytes % 2 == 0) {
        for (int word = 0; word < LANE_WORDS; word++) to[word] = 0;
        for (int half = 0; half < bytes / 2; half++)
            to[half / 2] |= static_cast<u32>(reinterpret_cast<const u16 *>(from)[half]) << 16 * (half % 2);
    } else {
        to[0] = from[0];
    }
}

// Number n of two keys' values, side by side in bf16.
DEVICE u32 numbers_of(const u32 (&a)[LANE_WORDS], const u32 (&b)[LANE_WORDS], int n) {
    if constexpr (KV_BITS == 8) return codes_as_bf16(two_bytes(a[n / 4], n % 4, b[n / 4], n % 4));
    if (n % 2) return a[n / 2] >> 16 | (b[n / 2] & 0xFFFF0000u);
    return (a[n / 2] & 0xFFFFu) | b[n / 2] << 16;
}

// Eight numbers of a key in bf16.
DEVICE uint4 key_numbers(const Kept *from) {
    if constexpr (KV_BITS == 8) {
        const uint2 codes = *reinterpret_cast<const uint2 *>(from);
        return make_uint4(
            codes_as_bf16(two_bytes(codes.x, 0, codes.x, 1)), codes_as_bf16(two_bytes(codes.x, 2, codes.x, 3)),
            codes_as_bf16(two_bytes(codes.y, 0, codes.y, 1)), codes_as_bf16(two_bytes(codes.y, 2, codes.y, 3)));
    }
    return *reinterpret_cast<const uint4 *>(from);
}

DEVICE float greater(float one, float other) { return one > other ? one : other; }

// A lane's logits of a tile: [..][0..1] of head g of 16, [..][2..3] of head g + 8, for its warp's keys 2t and 2t + 1.
// Lane (g, t) reads dimensions 8t to 8t + 7 of each 32 of key g. Rows of queries an odd multiple of 64 bytes apart keep
// the reads of two heads in different banks.
DEVICE void logits_of(float (&logits)[HEAD_TILES][4], const Kept *key, const u16 *queries, int g, int t) {
    for (int tile = 0; tile < HEAD_TILES; tile++)
        for (int each = 0; each < 4; each++) logits[tile][each] = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < HEAD_DIM; chunk += 32) {
        const uint4 own = key_numbers(key + chunk + 8 * t);
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++) {
            const u16 *from = queries + (16 * tile + g) * QUERY_PITCH + chunk + 8 * t;
            const uint4 upper = *reinterpret_cast<const uint4 *>(from);
            const uint4 lower = *reinterpret_cast<const uint4 *>(from + 8 * QUERY_PITCH);
            multiply_tiles(logits[tile], {upper.x, lower.x, upper.y, lower.y}, own.x, own.y);
            multiply_tiles(logits[tile], {upper.z, lower.z, upper.w, lower.w}, own.z, own.w);
        }
    }
}

// Add a tile's values by weights to a lane's sums: [..][n][0..1] of head g of 16, [..][n][2..3] of head g + 8, for number n
// of the dimensions of lanes (2t, ..) and (2t + 1, ..). Lane (g, t) reads LANE_DIMS numbers of keys 4t to 4t + 3 of each
// 16. Keys outside [low, high), counted from the tile's first, may hold anything.
DEVICE void add_values(
    float (&sums)[HEAD_TILES][LANE_DIMS][4], const Kept *values, u64 stride, const u16 *weights, int low, int high, int g,
    int t) {
#pragma unroll
    for (int chunk = 0; chunk < TILE_KEYS; chunk += 16) {
        u32 words[4][LANE_WORDS];
#pragma unroll
        for (int each = 0; each < 4; each++) {
            const int key = chunk + 4 * t + each;
            if (key < low || key >= high) {
                for (int word = 0; word < LANE_WORDS; word++) words[each][word] = 0;
            } else {
                load_numbers(words[each], values + key * stride);
            }
        }
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++) {
            const u16 *from = weights + (16 * tile + g) * WEIGHT_PITCH + chunk + 4 * t;
            const uint2 upper = *reinterpret_cast<const uint2 *>(from);
            const uint2 lower = *reinterpret_cast<const uint2 *>(from + 8 * WEIGHT_PITCH);
            const u32 own[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
            for (int n = 0; n < LANE_DIMS; n++)
                multiply_tiles(
                    sums[tile][n], own, numbers_of(words[0], words[1], n), numbers_of(words[2], words[3], n));
        }
    }
}

// Block: ((row * kv_heads + kv head) * parts + part) * head_blocks + which HEADS of the kv head's query heads.
KERNEL(attend_parts)(Sequences given, int head_blocks, Scales scales) {
    SHARED_MEMORY(shared);
    u16 *queries = reinterpret_cast<u16 *>(shared);     // [HEADS, QUERY_PITCH]
    u16 *weights = queries + HEADS * QUERY_PITCH;       // [HEADS, WEIGHT_PITCH]
    float *shares = reinterpret_cast<float *>(weights + HEADS * WEIGHT_PITCH);  // [HEADS, WARPS]
    const int part = blockIdx.x / head_blocks % given.parts, place = blockIdx.x / head_blocks / given.parts;
    const int row = place / given.kv_heads, kv_head = place % given.kv_heads;
    const Part own = part_of(given, row, part);
    if (own.first >= own.end) return;
    const int group = given.heads / given.kv_heads, skipped = blockIdx.x % head_blocks * HEADS;
    const int count = group - skipped < HEADS ? group - skipped : HEADS, first_head = kv_head * group + skipped;
    const u16 *asked = given.queries + static_cast<u64>(given.rows[row]) * given.query_stride + first_head * HEAD_DIM;
    for (int index = threadIdx.x; index < HEADS * HEAD_DIM / 8; index += blockDim.x) {
        const int head = index / (HEAD_DIM / 8), chunk = index % (HEAD_DIM / 8);
        uint4 found = make_uint4(0, 0, 0, 0);
        if (head < count) found = reinterpret_cast<const uint4 *>(asked + head * HEAD_DIM)[chunk];
        reinterpret_cast<uint4 *>(queries + head * QUERY_PITCH)[chunk] = found;
    }
    synchronise();
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float highest[HEAD_TILES][2], total[HEAD_TILES][2], sums[HEAD_TILES][LANE_DIMS][4];
    for (int tile = 0; tile < HEAD_TILES; tile++) {
        highest[tile][0] = highest[tile][1] = bits_as_float(0xFF800000u);  // minus infinity
        total[tile][0] = total[tile][1] = 0.0f;
        for (int n = 0; n < LANE_DIMS; n++)
            for (int each = 0; each < 4; each++) sums[tile][n][each] = 0.0f;
    }
    for (int at = own.first * TILE_KEYS; at < own.end * TILE_KEYS; at += TILE_KEYS) {
        const int page = given.tables[row * given.table_width + at / given.page_tokens];
        const u64 start = (static_cast<u64>(page) * given.page_tokens + at % given.page_tokens) * given.token_stride +
                          kv_head * HEAD_DIM;
        float key_scales[2] = {1.0f, 1.0f}, value_scales[2] = {1.0f, 1.0f};
        if constexpr (KV_BITS == 8)
            for (int side = 0; side < 2; side++) {
                const int key = 8 * warp + 2 * t + side;
                const u64 slot = static_cast<u64>(page) * given.page_tokens + at % given.page_tokens + key;
                const u64 place = slot * scales.stride + kv_head;
                key_scales[side] = widen_half(scales.keys[place]);
                const bool seen = at + key >= own.low && at + key < own.high;
                value_scales[side] = seen ? widen_half(scales.values[place]) : 0.0f;
            }
        float logits[HEAD_TILES][4];
        logits_of(
            logits, given.keys + start + static_cast<u64>(8 * warp + g) * given.token_stride, queries, g, t);
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                for (int side = 0; side < 2; side++) {
                    const int key = at + 8 * warp + 2 * t + side;
                    float logit = logits[tile][2 * half + side] * given.scale * key_scales[side];
                    if (given.softcap > 0.0f) logit = given.softcap * tanhf(logit / given.softcap);
                    logits[tile][2 * half + side] =
                        key >= own.low && key < own.high ? logit : bits_as_float(0xFF800000u);
                }
                float high = greater(logits[tile][2 * half], logits[tile][2 * half + 1]);
                high = greater(high, other_lane(high, 1));
                high = greater(high, other_lane(high, 2));
                if (t == 0) shares[(16 * tile + 8 * half + g) * WARPS + warp] = high;
            }
        synchronise();
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int head = 16 * tile + 8 * half + g;
                float high = highest[tile][half];
                for (int other = 0; other < WARPS; other++) high = greater(high, shares[head * WARPS + other]);
                const float kept = expf(highest[tile][half] - high);
                const float left = expf(logits[tile][2 * half] - high), right = expf(logits[tile][2 * half + 1] - high);
                highest[tile][half] = high;
                total[tile][half] = total[tile][half] * kept + left + right;
                for (int n = 0; n < LANE_DIMS; n++) {
                    sums[tile][n][2 * half] *= kept;
                    sums[tile][n][2 * half + 1] *= kept;
                }
                *reinterpret_cast<u32 *>(weights + head * WEIGHT_PITCH + 8 * warp + 2 * t) =
                    float_as_bf16(left * value_scales[0]) |
                    static_cast<u32>(float_as_bf16(right * value_scales[1])) << 16;
            }
        synchronise();
        add_values(
            sums, given.values + start + warp * (VALUE_DIM / WARPS) + g * LANE_DIMS, given.token_stride, weights,
            own.low - at, own.high - at, g, t);
    }
    for (int tile = 0; tile < HEAD_TILES; tile++)
        for (int half = 0; half < 2; half++) {
            float all = total[tile][half];
            all += other_lane(all, 1);
            all += other_lane(all, 2);
            if (t == 0) shares[(16 * tile + 8 * half + g) * WARPS + warp] = all;
        }
    synchronise();
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; tile++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int in_block = 16 * tile + 8 * half + g, head = first_head + in_block;
            if (in_block >= count) continue;
            float all = 0.0f;
            for (int other = 0; other < WARPS; other++) all += shares[in_block * WARPS + other];
            const int dim = warp * (VALUE_DIM / WARPS) + 2 * t * LANE_DIMS;
            if (given.parts == 1) {
                if (given.sinks) all += expf(given.sinks[head] - highest[tile][half]);
                u16 *to = given.out + static_cast<u64>(given.rows[row]) * given.out_stride + head * VALUE_DIM + dim;
                for (int side = 0; side < 2; side++)
                    for (int n = 0; n < LANE_DIMS; n++)
                        to[side * LANE_DIMS + n] = float_as_bf16(sums[tile][n][2 * half + side] / all);
                continue;
            }
            const u64 place = (static_cast<u64>(row) * given.heads + head) * given.parts + part;
            for (int side = 0; side < 2; side++)
                for (int n = 0; n < LANE_DIMS; n++)
                    given.sums[place * VALUE_DIM + dim + side * LANE_DIMS + n] = sums[tile][n][2 * half + side];
            if (warp == 0 && t == 0) {
                given.totals[2 * place] = highest[tile][half];
                given.totals[2 * place + 1] = all;
            }
        }
}

// Write a head's output from its parts. Block: row * heads + head.
KERNEL(merge_parts)(Sequences given) {
    SHARED_MEMORY(shared);
    float *factors = reinterpret_cast<float *>(shared);  // [parts]
    const int row = blockIdx.x / given.heads, head = blockIdx.x % given.heads;
    int count = 0;
    for (Part part = part_of(given, row, 0); count < given.parts && part.first < part.end;)
        part = part_of(given, row, ++count);
    if (count == 0) return;
    const u64 first = static_cast<u64>(blockIdx.x) * given.parts;
    float high = given.totals[2 * first];
    for (int part = 1; part < count; part++) high = greater(high, given.totals[2 * (first + part)]);
    float all = given.sinks ? expf(given.sinks[head] - high) : 0.0f;
    for (int part = 0; part < count; part++) {
        const float factor = expf(given.totals[2 * (first + part)] - high);
        all += factor * given.totals[2 * (first + part) + 1];
        if (threadIdx.x == 0) factors[part] = factor;
    }
    synchronise();
    u16 *to = given.out + static_cast<u64>(given.rows[row]) * given.out_stride + head * VALUE_DIM;
    for (int dim = threadIdx.x; dim < VALUE_DIM; dim += blockDim.x) {
        float sum = 0.0f;
        for (int part = 0; part < count; part++) sum += factors[part] * given.sums[(first + part) * VALUE_DIM + dim];
        to[dim] = float_as_bf16(sum / all);
    }
}
