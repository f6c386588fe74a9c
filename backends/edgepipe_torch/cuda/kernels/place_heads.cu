// Place a step's heads: normalise and rotate queries and keys in one pass, and write keys and values to the KV pool.
//
// A warp takes one head of one row. A lane has every 32nd pair of neighbours, which rotate together. A pool of int8 codes
// keeps a float16 scale for each head: edgepipe_torch/layers/kv_codes.py has the form.

struct Heads {
    u16 *heads;              // [rows, stride]: queries, keys, values, one after the other
    const float *turns;      // [rows, turned] complex numbers of each row's first pairs
    const long long *slots;  // [rows]
    void *pool;              // [slots, entries, dim]: keys, then values; bf16, or int8 where there are scales
    u16 *scales;             // [slots, entries]; null: the pool keeps no codes
    const u16 *query_norm;   // [dim] of each query; null: it is not normalised
    const u16 *key_norm;
    const u16 *value_norm;
    int rows;
    int stride;
    int queries;  // heads of a row
    int keys;
    int entries;  // heads of a row that the pool keeps
    int dim;
    int turned;  // pairs of a head that rotate; 0: none
    float eps;
    float scale_factor;  // a scale is a head's largest number times this, and ``least_scale``
    float least_scale;
};

struct Pair {
    float first;
    float second;
};

DEVICE u32 greater(u32 one, u32 other) { return one > other ? one : other; }

KERNEL(place_heads)(Heads given) {
    const int lane = threadIdx.x & 31, count = given.queries + given.entries, pairs = given.dim / 2;
    const u64 index = static_cast<u64>(blockIdx.x) * WARPS + (threadIdx.x >> 5);
    if (index >= static_cast<u64>(given.rows) * count) return;  // of all lanes alike
    const u64 row = index / count;
    const int head = index % count, entry = head - given.queries;
    const bool is_query = entry < 0, is_value = entry >= given.keys;
    const u16 *norm = is_query ? given.query_norm : is_value ? given.value_norm : given.key_norm;
    const int turned = is_value ? 0 : given.turned;
    if (is_query && !norm && !turned) return;
    u32 *own = reinterpret_cast<u32 *>(given.heads + row * given.stride + static_cast<u64>(head) * given.dim);
    const u64 vector = static_cast<u64>(given.slots[row]) * given.entries + (is_query ? 0 : entry);
    float factor = 1.0f;
    if (norm) {
        float squares = 0.0f;
        for (int pair = lane; pair < pairs; pair += 32) {
            const float first = bits_as_float(own[pair] << 16), second = bits_as_float(own[pair] & 0xFFFF0000u);
            squares += first * first + second * second;
        }
        for (int apart = 16; apart; apart /= 2) squares += other_lane(squares, apart);
        factor = 1.0f / sqrtf(squares / given.dim + given.eps);
    }
    const float *turns = given.turns + 2 * row * given.turned;
    const auto placed = [&](int pair) -> Pair {
        float first = bits_as_float(own[pair] << 16), second = bits_as_float(own[pair] & 0xFFFF0000u);
        if (norm) {
            first *= factor * bf16_as_float(norm[2 * pair]);
            second *= factor * bf16_as_float(norm[2 * pair + 1]);
        }
        if (pair < turned) {
            const float real = turns[2 * pair], imaginary = turns[2 * pair + 1], before = first;
            first = before * real - second * imaginary;
            second = before * imaginary + second * real;
        }
        return {first, second};
    };
    if (is_query || !given.scales) {
        u32 *to = is_query ? own : static_cast<u32 *>(given.pool) + vector * pairs;
        for (int pair = lane; pair < pairs; pair += 32) {
            const Pair found = placed(pair);
            to[pair] = float_as_bf16(found.first) | static_cast<u32>(float_as_bf16(found.second)) << 16;
        }
        return;
    }
    u32 highest = 0;  // bits of a size: those of infinity and of no number are the highest
    for (int pair = lane; pair < pairs; pair += 32) {
        const Pair found = placed(pair);
        highest = greater(highest, float_as_bits(found.first) & 0x7FFFFFFFu);
        highest = greater(highest, float_as_bits(found.second) & 0x7FFFFFFFu);
    }
    for (int apart = 1; apart < 32; apart *= 2)
        highest = greater(highest, float_as_bits(other_lane(bits_as_float(highest), apart)));
    u16 bits = float_as_half(bits_as_float(highest) * given.scale_factor + given.least_scale);
    const bool in_range = (bits & 0x7C00) != 0x7C00;
    if (!in_range) bits = 0x7E00;  // no number
    const float scale = widen_half(bits);
    u16 *codes = static_cast<u16 *>(given.pool) + vector * pairs;
    for (int pair = lane; pair < pairs; pair += 32) {
        const Pair found = placed(pair);
        const int first = in_range ? static_cast<int>(rintf(found.first / scale)) : 0;
        const int second = in_range ? static_cast<int>(rintf(found.second / scale)) : 0;
        codes[pair] = static_cast<u16>((first & 0xFF) | (second & 0xFF) << 8);
    }
    if (lane == 0) given.scales[vector] = bits;
}
