// Place a step's heads: normalise and rotate queries and keys in one pass, and write keys and values to the KV pool.
//
// A warp takes one head of one row. A lane has every 32nd pair of neighbours, which rotate together.

struct Heads {
    u16 *heads;              // [rows, stride]: queries, keys, values, one after the other
    const float *turns;      // [rows, turned] complex numbers of each row's first pairs
    const long long *slots;  // [rows]
    u16 *pool;               // [slots, entries, dim]: keys, then values
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
};

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
    u32 *kept = reinterpret_cast<u32 *>(
        given.pool + (static_cast<u64>(given.slots[row]) * given.entries + (is_query ? 0 : entry)) * given.dim);
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
    for (int pair = lane; pair < pairs; pair += 32) {
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
        const u32 placed = float_as_bf16(first) | static_cast<u32>(float_as_bf16(second)) << 16;
        (is_query ? own : kept)[pair] = placed;
    }
}
