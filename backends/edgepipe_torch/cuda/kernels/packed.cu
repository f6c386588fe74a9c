// Packed weights: one source for all forms, compiled once per form. products.cu multiplies with their tiles.
//
// value[o, i] = scale[o, i / group] * level(code[o, i]) + offset[o, i / group]
//
// Codes become bf16 levels without rounding: integers up to 8 bits, or entries of a table. Tensor cores multiply levels
// with bf16 inputs, and a float32 scale multiplies the float32 sum of each 16 or 32 inputs. So a product rounds only as
// float32 sums do, and its result once.
//
// A weight is stored in tiles of 16 out features and 128 inputs, out features first, both padded with zeros.
// Row r of a tile keeps lane t's values (t < 4) in 4 words, one per 32 inputs:
//
//   word w, bit 4j + 16h   lower 4 bits of input 32w + 16(j / 2) + 4t + 2(j % 2) + h         j < 4, h < 2
//
// Higher bits, HIGH per value, follow the same order: 4 / HIGH words share one,
//
//   word w * HIGH / 4, bit HIGH * (j + 4 (w % (4 / HIGH))) + 16h
//
// so one shift and one mask give a pair of neighbours, the halves of a tensor-core operand.
//
// Macros of a form:
//   BITS            4, 5, 6 or 8
//   GROUP           inputs of a scale: 16, 32, 64 or a multiple of 128; 0: all of a row
//   SPAN            inputs of a base scale, a multiple of 128; 0: scales have one level
//   SCALE_KIND      of scales, or of base scales: 0 float16, 1 bfloat16, 2 float32
//   SCALE_FACTOR    with SPAN: 1 unsigned, 2 signed 8-bit factors
//   OFFSET          0 none, 1 an integer zero, 2 an integer zero per group, 3 added
//   OFFSET_KIND, OFFSET_FACTOR   as for scales, with OFFSET 3
//   LEVELS          16 bf16 levels, comma-separated; absent: codes are integers
//   LEVELS_REST     what bf16 misses of each level, again in bf16; absent: nothing
//   E4M3            1: codes are float8_e4m3fn

#define HIGH (BITS - 4)
#define HIGH_WORDS (HIGH ? HIGH : 1)
#define SEGMENT (GROUP == 16 ? 16 : 32)  // inputs whose product is summed before it is scaled
#define SEGMENTS (TILE_INPUTS / SEGMENT)
#define GROUPS_PER_TILE (GROUP && GROUP < TILE_INPUTS ? TILE_INPUTS / GROUP : 1)
#define FULL_PAIRS 0x00010001u
#define BF16_128 0x43004300u  // 128.0: its 7 lowest bits are the ones place and above
#define BF16_ONE 0x3F803F80u

#ifdef LEVELS
__device__ const u16 levels[16] = {LEVELS};
#ifdef LEVELS_REST
__device__ const u16 levels_rest[16] = {LEVELS_REST};
#define TERMS 2  // a level is the sum of so many bf16 values
#else
#define TERMS 1
#endif
#define TABLE_BYTES (1024 * TERMS)
#else
#define TERMS 1
#define TABLE_BYTES 0
#endif

// The bf16 of an integer of up to 8 bits, in both halves.
DEVICE u32 integer_pair(int value) {
    const u32 bits = float_as_bits(static_cast<float>(value)) >> 16;
    return bits | bits << 16;
}

template <int KIND>
DEVICE float widened(u32 bits) {
    if constexpr (KIND == 0) return widen_half(static_cast<u16>(bits));
    if constexpr (KIND == 1) return bf16_as_float(static_cast<u16>(bits));
    return bits_as_float(bits);
}

// BYTES consecutive bytes in registers: a power of two up to 32.
template <int BYTES>
struct Bytes {
    u32 words[(BYTES + 3) / 4];

    // The index-th run of BYTES.
    DEVICE void load(const void *from, u64 index) {
        if constexpr (BYTES >= 16) {
#pragma unroll
            for (int part = 0; part < BYTES / 16; part++) {
                const uint4 found = static_cast<const uint4 *>(from)[index * (BYTES / 16) + part];
                words[4 * part] = found.x;
                words[4 * part + 1] = found.y;
                words[4 * part + 2] = found.z;
                words[4 * part + 3] = found.w;
            }
        } else if constexpr (BYTES == 8) {
            const uint2 found = static_cast<const uint2 *>(from)[index];
            words[0] = found.x;
            words[1] = found.y;
        } else if constexpr (BYTES == 4) {
            words[0] = static_cast<const u32 *>(from)[index];
        } else if constexpr (BYTES == 2) {
            words[0] = static_cast<const u16 *>(from)[index];
        } else {
            words[0] = static_cast<const u8 *>(from)[index];
        }
    }

    // The index-th value of SIZE bytes.
    template <int SIZE>
    DEVICE u32 get(int index) const {
        if constexpr (SIZE == 4) return words[index];
        return words[index * SIZE / 4] >> (8 * SIZE * (index % (4 / SIZE))) & ((1u << (8 * SIZE)) - 1);
    }
};

// A float per group of one row of a tile: widened values, or a base times 8-bit factors.
template <int KIND, int FACTOR>
struct GroupFloats {
    static constexpr int SIZE = FACTOR ? 1 : KIND == 2 ? 4 : 2;
    Bytes<SIZE * GROUPS_PER_TILE> values;
    Bytes<KIND == 2 ? 4 : 2> base;

    DEVICE void load(const void *values_from, const void *base_from, u64 group_row, u64 span_row) {
        values.load(values_from, group_row);
        if constexpr (FACTOR != 0) base.load(base_from, span_row);
    }

    DEVICE float get(int group) const {
        const u32 bits = values.template get<SIZE>(group);
        if constexpr (FACTOR == 0) return widened<KIND>(bits);
        const int factor = FACTOR == 2 ? static_cast<int>(static_cast<i8>(bits)) : static_cast<int>(bits);
        return widened<KIND>(base.template get<KIND == 2 ? 4 : 2>(0)) * static_cast<float>(factor);
    }
};

// What a row of a tile has besides its codes.
struct RowScales {
    GroupFloats<SCALE_KIND, SCALE_FACTOR> scale;
#if OFFSET == 3
    GroupFloats<OFFSET_KIND, OFFSET_FACTOR> offset;
#endif
#if OFFSET == 2
    Bytes<GROUPS_PER_TILE> zeros;
#endif

    DEVICE void load(const Weight &weight, int row_tile, int input_tile, int row) {
        const int group_tile = GROUP == 0 ? 0 : GROUP > TILE_INPUTS ? input_tile / (GROUP / TILE_INPUTS) : input_tile;
        const u64 group_row = (static_cast<u64>(row_tile) * weight.group_tiles + group_tile) * TILE_ROWS + row;
        const int span = SPAN ? input_tile / (SPAN / TILE_INPUTS) : 0;
        const u64 span_row = (static_cast<u64>(row_tile) * weight.spans + span) * TILE_ROWS + row;
        scale.load(weight.scale, weight.scale_base, group_row, span_row);
#if OFFSET == 3
        offset.load(weight.offset, weight.offset_base, group_row, span_row);
#endif
#if OFFSET == 2
        zeros.load(weight.zeros, group_row);
#endif
    }

    // The integer zero of a group.
    DEVICE int zero(const Weight &weight, int group) const {
#if OFFSET == 2
        return static_cast<int>(zeros.template get<1>(group));
#else
        return OFFSET == 1 ? weight.zero : 0;
#endif
    }
};

// The bf16 levels (or one term of them) of codes (w, j, h = 0) and (w, j, h = 1); ``shift``: -(128 + zero), or -zero for 8 bits.
DEVICE u32 level_pair(u32 low, u32 high, int w, int j, u32 shift, const u32 *table) {
#if defined(LEVELS)
    const u32 lower = low >> (4 * j) & (15 * FULL_PAIRS);
    return table[(lower | lower >> 12) & 255];
#elif HIGH == 0
    return fma_bf16_pair(masked_or(low >> (4 * j), 15 * FULL_PAIRS, BF16_128), BF16_ONE, shift);
#else
    const u32 higher = high >> (HIGH * (j + 4 * (w % (4 / HIGH)))) & (((1u << HIGH) - 1) * FULL_PAIRS);
#if E4M3
    const u32 lower = low >> (4 * j) & (15 * FULL_PAIRS);
    const u32 bits = (higher & (8 * FULL_PAIRS)) << 12 | (higher & (7 * FULL_PAIRS)) << 8 | lower << 4;
    return fma_bf16_pair(bits, 0x7B807B80u, 0);  // exponents of bf16 are biased by 127, of e4m3 by 7: times 2^120
#elif HIGH == 4
    const u32 centred = fma_bf16_pair(BF16_128 | higher, BF16_ONE, 0xC308C308u);  // minus 136: -8 to 7
    const u32 ones = fma_bf16_pair(masked_or(low >> (4 * j), 15 * FULL_PAIRS, BF16_128), BF16_ONE, shift);
    return fma_bf16_pair(centred, 0x41804180u, ones);  // times 16, and ones of 128 more than the lower bits
#else
    const u32 lower = masked_or(low >> (4 * j), 15 * FULL_PAIRS, BF16_128);
    return fma_bf16_pair(lower | higher << 4, BF16_ONE, shift);
#endif
#endif
}

DEVICE u32 level_shift(int zero) { return integer_pair(BITS == 8 ? -zero : -(128 + zero)); }

DEVICE int group_of(int segment) { return GROUP && GROUP < TILE_INPUTS ? segment / (GROUP / SEGMENT) : 0; }

// Fill the table of levels by pairs of codes: 256 words for each term.
DEVICE void fill_table(u32 *table) {
#ifdef LEVELS
    for (int pair = threadIdx.x; pair < 256; pair += blockDim.x) {
        table[pair] = levels[pair & 15] | static_cast<u32>(levels[pair >> 4]) << 16;
#if TERMS == 2
        table[256 + pair] = levels_rest[pair & 15] | static_cast<u32>(levels_rest[pair >> 4]) << 16;
#endif
    }
#endif
}

// One lane's part of a tile: its words of rows g and g + 8.
struct TilePart {
    Bytes<16> low[2];
    Bytes<4 * HIGH_WORDS> high[2];
    RowScales scales[2];

    DEVICE void load(const Weight &weight, int row_tile, int input_tile, int lane) {
        const u64 tile = static_cast<u64>(row_tile) * weight.input_tiles + input_tile;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = (lane >> 2) + 8 * half;
            const u64 words = (tile * TILE_ROWS + row) * 4 + (lane & 3);
            low[half].load(weight.low, words);
            if constexpr (HIGH != 0) high[half].load(weight.high, words);
            scales[half].load(weight, row_tile, input_tile, row);
        }
    }
};

// Add the product of a tile with the staged inputs from ``first`` on to sums [16, 8 * COLUMN_TILES].
// PARTLY: leave out column tiles without rows, of the largest product in pairs: two that the compiler mixes take fewer
// instructions than two apart, and four or more would take more registers than two blocks of a multiprocessor have.
template <int COLUMN_TILES, bool PARTLY>
DEVICE void multiply_part(
    float (&sums)[COLUMN_TILES][4], const Weight &weight, const TilePart &part, const Staged &staged, int first,
    const u32 *table, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        u32 a[TERMS][2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 high_word = HIGH ? part.high[half].words[w * HIGH / 4] : 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int zero = part.scales[half].zero(weight, group_of((32 * w + 16 * (j >> 1)) / SEGMENT));
#pragma unroll
                for (int term = 0; term < TERMS; term++)
                    a[term][j >> 1][2 * (j & 1) + half] =
                        level_pair(part.low[half].words[w], high_word, w, j, level_shift(zero), table + 256 * term);
            }
        }
#pragma unroll
        for (int s = 0; s < 32 / SEGMENT; s++) {
            const int segment = w * (32 / SEGMENT) + s;
            const float scale0 = part.scales[0].scale.get(group_of(segment));
            const float scale1 = part.scales[1].scale.get(group_of(segment));
#pragma unroll
            for (int tile = 0; tile < COLUMN_TILES; tile++) {
                if (PARTLY && (COLUMN_TILES < MOST_COLUMN_TILES || tile % 2 == 0) && 8 * tile >= staged.rows) break;
                const int row = staged_row<COLUMN_TILES>(8 * tile + g, staged);
                const unsigned char *from = staged.inputs + row * staged.pitch + 2 * (first + SEGMENT * segment + 4 * t);
                float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int step = 0; step < SEGMENT / 16; step++) {
                    const uint2 b = *reinterpret_cast<const uint2 *>(from + 32 * step);
#pragma unroll
                    for (int term = 0; term < TERMS; term++)
                        multiply_tiles(product, a[term][SEGMENT == 16 ? s : step], b.x, b.y);
                }
                sums[tile][0] += scale0 * product[0];
                sums[tile][1] += scale0 * product[1];
                sums[tile][2] += scale1 * product[2];
                sums[tile][3] += scale1 * product[3];
#if OFFSET == 3
                const float offset0 = part.scales[0].offset.get(group_of(segment));
                const float offset1 = part.scales[1].offset.get(group_of(segment));
                const float *totals =
                    staged.sums + (first / SEGMENT + segment) * (8 * COLUMN_TILES) + 8 * tile + 2 * t;
                sums[tile][0] += offset0 * totals[0];
                sums[tile][1] += offset0 * totals[1];
                sums[tile][2] += offset1 * totals[0];
                sums[tile][3] += offset1 * totals[1];
#endif
            }
        }
    }
}

// Write values [count, in_features] in bf16, rounded once: of out features ``ids``, or of ``first`` and up without ids.
//
// A thread writes half of a row of a tile: lanes 2 * half and 2 * half + 1 hold eight neighbours of each 16 inputs.
KERNEL(dequantise)(Weight weight, const long long *ids, int first, int count, u16 *out) {
    SHARED_MEMORY(shared);
    u32 *table = reinterpret_cast<u32 *>(shared);
    fill_table(table);
    synchronise();
    const u32 halves = 2u * count * weight.input_tiles;
    for (u32 index = blockIdx.x * blockDim.x + threadIdx.x; index < halves; index += gridDim.x * blockDim.x) {
        const u32 half = index & 1, entry = index / 2 / weight.input_tiles;
        const int input_tile = index / 2 - entry * weight.input_tiles;
        const int out_feature = ids ? static_cast<int>(ids[entry]) : first + static_cast<int>(entry);
        const int row_tile = out_feature / TILE_ROWS, row = out_feature % TILE_ROWS;
        const u64 tile = static_cast<u64>(row_tile) * weight.input_tiles + input_tile;
        const u64 words = (tile * TILE_ROWS + row) * 4 + 2 * half;
        Bytes<16> low[2];
        Bytes<4 * HIGH_WORDS> high[2];
#pragma unroll
        for (int lane = 0; lane < 2; lane++) {
            low[lane].load(weight.low, words + lane);
            if constexpr (HIGH != 0) high[lane].load(weight.high, words + lane);
        }
        RowScales scales;
        scales.load(weight, row_tile, input_tile, row);
        const int input = input_tile * TILE_INPUTS + 8 * half;
        u16 *to = out + static_cast<u64>(entry) * weight.in_features + input;
#pragma unroll
        for (int part = 0; part < TILE_INPUTS / 16; part++) {
            if (input + 16 * part >= weight.in_features) continue;
            const int w = part / 2, group = group_of(16 * part / SEGMENT);
            const u32 shift = level_shift(scales.zero(weight, group));
            const float scale = scales.scale.get(group);
            u32 pairs[4];
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                const int lane = pair / 2, j = 2 * (part % 2) + pair % 2;
                const u32 high_word = HIGH ? high[lane].words[w * HIGH / 4] : 0;
                float values[2] = {0.0f, 0.0f};
#pragma unroll
                for (int term = 0; term < TERMS; term++) {
                    const u32 levels_found = level_pair(low[lane].words[w], high_word, w, j, shift, table + 256 * term);
                    values[0] += bits_as_float(levels_found << 16);
                    values[1] += bits_as_float(levels_found & 0xFFFF0000u);
                }
                values[0] *= scale;
                values[1] *= scale;
#if OFFSET == 3
                const float offset = scales.offset.get(group);
                values[0] += offset;
                values[1] += offset;
#endif
                pairs[pair] = rounded_pair(values[0], values[1]);
            }
            *reinterpret_cast<uint4 *>(to + 16 * part) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}
