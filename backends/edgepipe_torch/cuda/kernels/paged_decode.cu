// Attention of single rows over pages, in two passes over a row's keys: parts of them, then the sum of the parts.
//
// It serves heads that FlashAttention-2 excludes: larger ones, values that are the first numbers of their keys, and
// capped logits; and all heads where torch's kernel reads no pages. HEAD_DIM is a multiple of 32, VALUE_DIM is 64 or a
// multiple of 128, a page's tokens are a multiple of TILE_KEYS.
//
// KV_BITS is 16 for bf16, or 8 for int8 codes with a float16 scale for each key and each value. Codes become bf16 without
// rounding. A key's scale multiplies its logits, a value's scale its weights.
//
// With KV_BITS 4, a key or value is rotated in blocks of BLOCK numbers and has a scale for each 32 of them
// (edgepipe_torch/layers/kv_codes.py): ``(code - 7.5) * scale``, exact in bf16. Queries are rotated alike, results back. A
// row reads the keys of its own span with 8 bits: ``(lower bits - 7.5) * scale / 16`` is the rest of a number, exact, too.
// So the last tile is multiplied twice, the second time with the lower bits, which lie REST_KEYS slots later.
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
#define TURNING_PITCH (VALUE_DIM + 8)  // rows of results, which 8 lanes write at a time
#define LANE_DIMS (VALUE_DIM / WARPS / 8)  // numbers of a value that a lane reads
#define LANE_WORDS ((LANE_DIMS * KV_BITS + 31) / 32)  // words that hold them
#define KEPT(numbers) (KV_BITS == 4 ? (numbers) / 2 : (numbers))  // of ``Kept``

// Pieces of a key and of a tile's values at once: as many as leave no register to memory (sm_80, 89, 90 and 120).
#define KEY_UNROLL (KV_BITS == 4 ? 4 : HEAD_DIM / 32)
#define MANY_SUMS (VALUE_DIM == 128 * HEAD_TILES && HEAD_TILES > (KV_BITS == 4 ? 2 : 1))
#define VALUE_UNROLL (KV_BITS < 16 && MANY_SUMS ? 2 : 4)

#if KV_BITS == 16
typedef u16 Kept;
#else
typedef u8 Kept;
#endif

#if KV_BITS == 4
typedef u8 Scale;
#define GROUP 32
#define SPAN 32       // a multiple begins the keys that a row reads with 8 bits: SPAN_TOKENS of edgepipe/spec/kv_forms.py
#define REST_KEYS 48  // REST_TOKENS there
#define SMALLEST_SCALE 856  // upper bits of 2 ** -20 in bf16, of which a scale's byte counts up: LEAST_BITS of kv_codes.py
#define SIXTEENTH 32        // what a byte loses where its scale is divided by 16
#else
typedef u16 Scale;
#endif

struct Sequences {
    const u16 *queries;  // [.., heads, HEAD_DIM], ``query_stride`` from row to row
    const Kept *keys;    // [pages, page_tokens, kv heads, KEPT(HEAD_DIM)], ``token_stride`` from token to token
    const Kept *values;  // [pages, page_tokens, kv heads, KEPT(VALUE_DIM)], strides as those of keys
    const int *rows;     // [R] places in queries and out
    const int *lengths;  // [R] keys up to each row's own; 0: the row is left alone
    const int *tables;   // [R, table_width] pages, with KV_BITS 4 those of lower bits, too
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
    const Scale *keys;    // [pages, page_tokens, kv heads], with KV_BITS 4 [.., groups]; ``stride`` from token to token
    const Scale *values;  // as keys
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

#if KV_BITS == 4

// A scale in both halves of a word, in bf16, less some eighths of its exponent.
DEVICE u32 scale_pair(u32 byte, u32 less) { return byte == 255 ? 0x7FC07FC0u : (byte + SMALLEST_SCALE - less) * 0x00100010u; }

// Two codes, bits 3 to 6 of a word's halves, times their scales: 16 and four bits, less 23.5.
DEVICE u32 scaled_codes(u32 bits, u32 scales) {
    return fma_bf16_pair(
        fma_bf16_pair(masked_or(bits, 0x00780078u, 0x41804180u), 0x3F803F80u, 0xC1BCC1BCu), scales, 0x80008000u);
}

// Multiply each BLOCK of a vector with the Hadamard matrix. A lane has every 32nd number.
template <int COUNT>
DEVICE void turn(float (&own)[COUNT], int lane) {
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2)
#pragma unroll
        for (int place = 0; place < COUNT; place++) {
            const float other = other_lane(own[place], apart);
            own[place] = lane & apart ? other - own[place] : own[place] + other;
        }
#pragma unroll
    for (int apart = 1; 32 * apart < BLOCK; apart *= 2)
#pragma unroll
        for (int place = 0; place < COUNT; place++)
            if (!(place & apart)) {
                const float one = own[place], other = own[place + apart];
                own[place] = one + other;
                own[place + apart] = one - other;
            }
#pragma unroll
    for (int place = 0; place < COUNT; place++) own[place] *= BLOCK_SCALE;
}

// Write a head's result, of which a lane has every 32nd number, rotated back.
DEVICE void write_turned(u16 *to, const float *from, int lane) {
    float own[VALUE_DIM / 32];
#pragma unroll
    for (int place = 0; place < VALUE_DIM / 32; place++) own[place] = from[32 * place + lane];
    turn(own, lane);
#pragma unroll
    for (int place = 0; place < VALUE_DIM / 32; place++) to[32 * place + lane] = float_as_bf16(own[place]);
}

#endif

// The place among a value's numbers of number n of a lane of 8, for a warp.
DEVICE int value_place(int warp, int lane, int n) {
    if constexpr (KV_BITS == 4) {
        constexpr int bytes = LANE_DIMS / 2;  // of a lane; 0: two lanes share one
        const int code = (8 * warp + lane) * LANE_DIMS / 2 + (bytes ? n % (bytes + !bytes) : 0);
        const int is_upper = bytes ? n / (bytes + !bytes) : lane & 1;
        return code / 16 * 32 + code % 16 + 16 * is_upper;
    }
    return warp * (VALUE_DIM / WARPS) + lane * LANE_DIMS + n;
}

// The LANE_DIMS numbers of a value from an address that is a multiple of their size, or of its largest power of two.
DEVICE void load_numbers(u32 (&to)[LANE_WORDS], const Kept *from) {
    constexpr int bytes = LANE_DIMS * KV_BITS > 8 ? LANE_DIMS * KV_BITS / 8 : 1;
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

// Number n of two keys' values, side by side in bf16. ``scales``: of both, with KV_BITS 4.
DEVICE u32 numbers_of(const u32 (&a)[LANE_WORDS], const u32 (&b)[LANE_WORDS], int n, u32 scales) {
#if KV_BITS == 4
    constexpr int bytes = LANE_DIMS > 1 ? LANE_DIMS / 2 : 1;
    const u32 codes = two_bytes(a[n % bytes / 4], n % bytes % 4, b[n % bytes / 4], n % bytes % 4);
    return scaled_codes(n < bytes ? codes << 3 : codes >> 1, scales);
#endif
    if constexpr (KV_BITS == 8) return codes_as_bf16(two_bytes(a[n / 4], n % 4, b[n / 4], n % 4));
    if (n % 2) return a[n / 2] >> 16 | (b[n / 2] & 0xFFFF0000u);
    return (a[n / 2] & 0xFFFFu) | b[n / 2] << 16;
}

// Eight numbers of a key in bf16, from the first of eight or, with KV_BITS 4, from the lower four of eight.
DEVICE uint4 key_numbers(const Kept *from, u32 scales) {
#if KV_BITS == 4
    const u32 codes = *reinterpret_cast<const u32 *>(from);
    return make_uint4(
        scaled_codes(codes << 3, scales), scaled_codes(codes >> 1, scales), scaled_codes(codes >> 5, scales),
        scaled_codes(codes >> 9, scales));
#endif
    if constexpr (KV_BITS == 8) {
        const uint2 codes = *reinterpret_cast<const uint2 *>(from);
        return make_uint4(
            codes_as_bf16(two_bytes(codes.x, 0, codes.x, 1)), codes_as_bf16(two_bytes(codes.x, 2, codes.x, 3)),
            codes_as_bf16(two_bytes(codes.y, 0, codes.y, 1)), codes_as_bf16(two_bytes(codes.y, 2, codes.y, 3)));
    }
    return *reinterpret_cast<const uint4 *>(from);
}

DEVICE float greater(float one, float other) { return one > other ? one : other; }

// The place of a query's number among 32 in shared memory, where those of a lane's read adjoin. ``key_numbers`` gives, of
// 32 numbers with KV_BITS 4, lane t numbers 4t, 4t + 2, 16 + 4t, 18 + 4t, and their right neighbours.
DEVICE int query_place(int number) {
    return number % 16 / 4 * 8 + (number & 1) * 4 + number / 16 * 2 + (number % 4 >> 1);
}

// Add products to a lane's logits of a tile: [..][0..1] of head g of 16, [..][2..3] of head g + 8, for its warp's keys 2t
// and 2t + 1. Lane (g, t) reads dimensions 8t to 8t + 7 of each 32 of key g. Rows of queries an odd multiple of 64 bytes
// apart keep the reads of two heads in different banks. ``scale_of(group)``: scales of 32 numbers, with KV_BITS 4.
template <typename ScaleOf>
DEVICE void add_logits(
    float (&logits)[HEAD_TILES][4], const Kept *key, const u16 *queries, int g, int t, const ScaleOf &scale_of) {
#pragma unroll KEY_UNROLL
    for (int chunk = 0; chunk < HEAD_DIM; chunk += 32) {
        const uint4 own = key_numbers(key + KEPT(chunk + 8 * t), scale_of(chunk / 32));
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
// 16, by ``value_of(key)``. Keys outside [low, high), counted from the tile's first, may hold anything.
// ``scale_of(key)``: scales of a key's numbers, with KV_BITS 4.
template <typename ValueOf, typename ScaleOf>
DEVICE void add_values(
    float (&sums)[HEAD_TILES][LANE_DIMS][4], const u16 *weights, int low, int high, int g, int t,
    const ValueOf &value_of, const ScaleOf &scale_of) {
#pragma unroll VALUE_UNROLL
    for (int chunk = 0; chunk < TILE_KEYS; chunk += 16) {
        u32 words[4][LANE_WORDS], scales[4];
#pragma unroll
        for (int each = 0; each < 4; each++) {
            const int key = chunk + 4 * t + each;
            if (key < low || key >= high) {
                for (int word = 0; word < LANE_WORDS; word++) words[each][word] = 0;
                scales[each] = 0;
            } else {
                load_numbers(words[each], value_of(key));
                scales[each] = scale_of(key);
            }
            if (KV_BITS == 4 && LANE_DIMS == 1) words[each][0] >>= 4 * (g & 1);
        }
        const u32 pairs[2] = {
            (scales[0] & 0xFFFFu) | (scales[1] & 0xFFFF0000u), (scales[2] & 0xFFFFu) | (scales[3] & 0xFFFF0000u)};
#pragma unroll
        for (int tile = 0; tile < HEAD_TILES; tile++) {
            const u16 *from = weights + (16 * tile + g) * WEIGHT_PITCH + chunk + 4 * t;
            const uint2 upper = *reinterpret_cast<const uint2 *>(from);
            const uint2 lower = *reinterpret_cast<const uint2 *>(from + 8 * WEIGHT_PITCH);
            const u32 own[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
            for (int n = 0; n < LANE_DIMS; n++)
                multiply_tiles(
                    sums[tile][n], own, numbers_of(words[0], words[1], n, pairs[0]),
                    numbers_of(words[2], words[3], n, pairs[1]));
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
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#if KV_BITS == 4
    const int lane = threadIdx.x % 32;
    for (int head = warp; head < HEADS; head += WARPS) {
        float turning[HEAD_DIM / 32];
#pragma unroll
        for (int chunk = 0; chunk < HEAD_DIM / 32; chunk++)
            turning[chunk] = head < count ? bf16_as_float(asked[head * HEAD_DIM + 32 * chunk + lane]) : 0.0f;
        turn(turning, lane);
#pragma unroll
        for (int chunk = 0; chunk < HEAD_DIM / 32; chunk++)
            queries[head * QUERY_PITCH + 32 * chunk + query_place(lane)] = float_as_bf16(turning[chunk]);
    }
#else
    for (int index = threadIdx.x; index < HEADS * HEAD_DIM / 8; index += blockDim.x) {
        const int head = index / (HEAD_DIM / 8), chunk = index % (HEAD_DIM / 8);
        uint4 found = make_uint4(0, 0, 0, 0);
        if (head < count) found = reinterpret_cast<const uint4 *>(asked + head * HEAD_DIM)[chunk];
        reinterpret_cast<uint4 *>(queries + head * QUERY_PITCH)[chunk] = found;
    }
#endif
    synchronise();
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
                          kv_head * KEPT(HEAD_DIM);
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
        float logits[HEAD_TILES][4] = {};
        const auto no_scale = [](int) -> u32 { return 0; };
#if KV_BITS == 4
        // Of a key of the tile: its slot, that of its lower bits, and whether the row reads these.
        const u64 first_slot = static_cast<u64>(page) * given.page_tokens + at % given.page_tokens;
        const int span = (own.high - 1) / SPAN * SPAN - at;
        const auto reads_rest = [&](int key) { return key >= span && at + key < own.high; };
        const auto rest_slot = [&](int key) -> u64 {
            const int place = at + key + REST_KEYS;
            const u64 rest_page = given.tables[row * given.table_width + place / given.page_tokens];
            return rest_page * given.page_tokens + place % given.page_tokens;
        };
        const int passes = span < TILE_KEYS ? 2 : 1;
#pragma unroll 1
        for (int pass = 0; pass < passes; pass++) {
            const int key = 8 * warp + g;
            const bool is_rest = pass && reads_rest(key);
            const u64 slot = is_rest ? rest_slot(key) : first_slot + key;
            const Scale *of_key = scales.keys + (first_slot + key) * scales.stride + kv_head * (HEAD_DIM / GROUP);
            add_logits(
                logits, given.keys + slot * given.token_stride + kv_head * KEPT(HEAD_DIM), queries, g, t,
                [&](int group) { return is_rest == pass ? scale_pair(of_key[group], pass * SIXTEENTH) : 0; });
        }
#else
        add_logits(
            logits, given.keys + start + static_cast<u64>(8 * warp + g) * given.token_stride, queries, g, t, no_scale);
#endif
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
#if KV_BITS == 4
        const int code = (8 * warp + g) * LANE_DIMS / 2;  // the lane's first
#pragma unroll 1
        for (int pass = 0; pass < passes; pass++) {
            const int low = pass && span > own.low - at ? span : own.low - at;
            add_values(
                sums, weights, low, own.high - at, g, t,
                [&](int key) {
                    const u64 slot = pass ? rest_slot(key) : first_slot + key;
                    return given.values + slot * given.token_stride + kv_head * KEPT(HEAD_DIM) + code;
                },
                [&](int key) {
                    const u64 place = (first_slot + key) * scales.stride + kv_head * (HEAD_DIM / GROUP) + code / 16;
                    return scale_pair(scales.values[place], pass * SIXTEENTH);
                });
        }
#else
        const Kept *values = given.values + start + warp * (VALUE_DIM / WARPS) + g * LANE_DIMS;
        add_values(
            sums, weights, own.low - at, own.high - at, g, t,
            [&](int key) { return values + key * static_cast<u64>(given.token_stride); }, no_scale);
#endif
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
            if (given.parts == 1) {
                if (given.sinks) all += expf(given.sinks[head] - highest[tile][half]);
                total[tile][half] = all;
                if (KV_BITS == 4) continue;
                u16 *to = given.out + static_cast<u64>(given.rows[row]) * given.out_stride + head * VALUE_DIM;
                for (int side = 0; side < 2; side++)
                    for (int n = 0; n < LANE_DIMS; n++)
                        to[value_place(warp, 2 * t + side, n)] = float_as_bf16(sums[tile][n][2 * half + side] / all);
                continue;
            }
            const u64 place = (static_cast<u64>(row) * given.heads + head) * given.parts + part;
            for (int side = 0; side < 2; side++)
                for (int n = 0; n < LANE_DIMS; n++)
                    given.sums[place * VALUE_DIM + value_place(warp, 2 * t + side, n)] = sums[tile][n][2 * half + side];
            if (warp == 0 && t == 0) {
                given.totals[2 * place] = highest[tile][half];
                given.totals[2 * place + 1] = all;
            }
        }
#if KV_BITS == 4
    if (given.parts > 1) return;
    float *turning = reinterpret_cast<float *>(shared);  // [16, TURNING_PITCH], in place of queries and weights
#pragma unroll
    for (int tile = 0; tile < HEAD_TILES; tile++) {
        synchronise();
#pragma unroll
        for (int half = 0; half < 2; half++)
            for (int side = 0; side < 2; side++)
                for (int n = 0; n < LANE_DIMS; n++)
                    turning[(8 * half + g) * TURNING_PITCH + value_place(warp, 2 * t + side, n)] =
                        sums[tile][n][2 * half + side] / total[tile][half];
        synchronise();
        for (int head = warp; head < 16 && 16 * tile + head < count; head += WARPS)
            write_turned(
                given.out + static_cast<u64>(given.rows[row]) * given.out_stride +
                    (first_head + 16 * tile + head) * VALUE_DIM,
                turning + head * TURNING_PITCH, lane);
    }
#endif
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
    float *turning = factors + given.parts;  // [VALUE_DIM], with KV_BITS 4
    for (int dim = threadIdx.x; dim < VALUE_DIM; dim += blockDim.x) {
        float sum = 0.0f;
        for (int part = 0; part < count; part++) sum += factors[part] * given.sums[(first + part) * VALUE_DIM + dim];
        if (KV_BITS == 4) {
            turning[dim] = sum / all;
        } else {
            to[dim] = float_as_bf16(sum / all);
        }
    }
#if KV_BITS == 4
    synchronise();
    if (threadIdx.x < 32) write_turned(to, turning, threadIdx.x);
#endif
}
