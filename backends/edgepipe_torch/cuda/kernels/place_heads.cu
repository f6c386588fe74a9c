// Place a step's heads: normalise and rotate queries and keys in one pass, and write keys and values to the KV pool.
//
// A warp takes one head of one row. A lane has every 32nd pair of neighbours, which rotate together. A pool of int8 codes
// keeps a float16 scale for each head, one of 4-bit codes a byte for each 32 values: edgepipe_torch/layers/kv_codes.py
// has the forms.

struct Heads {
    u16 *heads;              // [rows, stride]: queries, keys, values, one after the other
    const float *turns;      // [rows, turned] complex numbers of each row's first pairs
    const long long *slots;  // [rows]
    void *pool;              // [slots, entries, dim]: keys, then values; bf16, or int8 where there are scales
    void *scales;            // [slots, entries] of float16; null: the pool keeps no codes
    u8 *rests;               // with ``block``: [rows, entries, dim / 2], the lower bits of codes with 8; or null
    const long long *rest_slots;  // with ``block``: [rows] slots of the pool for the lower bits, or null
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
    int block;   // the pool is [slots, entries, dim / 2] of 4-bit codes of such blocks, scales [.., dim / 32]; 0: not so
    float eps;
    float scale_factor;  // a scale is a head's largest number times this, and ``least_scale``
    float least_scale;
    float block_scale;  // one over the root of ``block``
};

struct Pair {
    float first;
    float second;
};

#define SMALLEST_SCALE 856  // upper bits of 2 ** -20 as a float, of which a scale's byte counts up: LEAST_BITS
#define NO_SCALE 255

DEVICE u32 greater(u32 one, u32 other) { return one > other ? one : other; }

// The bits of a pair's larger size: those of infinity and of no number are the highest.
DEVICE u32 size_of(Pair pair) {
    return greater(float_as_bits(pair.first) & 0x7FFFFFFFu, float_as_bits(pair.second) & 0x7FFFFFFFu);
}

DEVICE u32 other_lane_bits(u32 bits, int apart) { return float_as_bits(other_lane(bits_as_float(bits), apart)); }

// A step of a Hadamard matrix with a partner: the sum, or the difference where this is the second of them.
DEVICE float added(float own, float other, bool is_second) { return is_second ? other - own : own + other; }

// The code of 8 bits of a value in scales; 0 without a scale.
DEVICE u32 whole_code(float value, float scale, bool has_scale) {
    if (!has_scale) return 0;
    float raised = (value / scale + 8.0f) * 16.0f;
    raised = raised > 0.0f ? raised : 0.0f;
    return static_cast<u32>(raised < 255.0f ? raised : 255.0f);
}

// Multiply each block of a head with the Hadamard matrix. A lane's pairs are at its own places of ``own`` [rounds, 32].
DEVICE void turn_pairs(Pair *own, int rounds, int block, float block_scale, int lane) {
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        Pair found = own[32 * round + lane];
        found = {found.first + found.second, found.first - found.second};
        for (int apart = 1; apart < 32 && 2 * apart < block; apart *= 2) {
            const bool is_second = lane & apart;
            found.first = added(found.first, other_lane(found.first, apart), is_second);
            found.second = added(found.second, other_lane(found.second, apart), is_second);
        }
        own[32 * round + lane] = found;
    }
    for (int apart = 1; 64 * apart < block; apart *= 2)
        for (int round = 0; round < rounds; round++) {
            if (round & apart) continue;
            const Pair one = own[32 * round + lane], other = own[32 * (round + apart) + lane];
            own[32 * round + lane] = {one.first + other.first, one.second + other.second};
            own[32 * (round + apart) + lane] = {one.first - other.first, one.second - other.second};
        }
    for (int round = 0; round < rounds; round++) {
        own[32 * round + lane].first *= block_scale;
        own[32 * round + lane].second *= block_scale;
    }
}

// Write the 4-bit codes of turned pairs, their scales, and their lower bits to ``rests``, where it is not null, and to
// ``more``. Half a warp has a group of 32 values. A byte has a value of the group's first half and its counterpart of the
// second, and so do two lanes.
DEVICE void write_four_bits(const Pair *own, int rounds, int dim, u8 *codes, u8 *scales, u8 *rests, u8 *more, int lane) {
    const int of_half = lane & 15;
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        const Pair found = own[32 * round + lane];
        u32 highest = size_of(found);
        for (int apart = 1; apart < 16; apart *= 2) highest = greater(highest, other_lane_bits(highest, apart));
        const u32 wanted = float_as_bits(bits_as_float(highest) * (1.0f / 7.5f)) & 0x7FFFFFFFu;
        const int counted = static_cast<int>((wanted + (1u << 19)) >> 20) - SMALLEST_SCALE;
        const int byte = counted < 0 ? 0 : counted < NO_SCALE ? counted : NO_SCALE;
        const bool has_scale = byte != NO_SCALE;
        const float scale = bits_as_float(static_cast<u32>(byte + SMALLEST_SCALE) << 20);
        const u32 mine = whole_code(found.first, scale, has_scale) | whole_code(found.second, scale, has_scale) << 8;
        const u32 theirs = other_lane_bits(mine, 8);
        const int group = 2 * round + lane / 16, place = 16 * group + 2 * (of_half & 7);
        if (32 * group >= dim) continue;
        if (of_half == 0) scales[group] = byte;
        if (of_half < 8) {
            *reinterpret_cast<u16 *>(codes + place) = (mine >> 4 & 0x0F0F) | (theirs & 0xF0F0);
        } else {
            const u16 lower = (theirs & 0x0F0F) | (mine << 4 & 0xF0F0);
            if (rests) *reinterpret_cast<u16 *>(rests + place) = lower;
            if (more) *reinterpret_cast<u16 *>(more + place) = lower;
        }
    }
}

KERNEL(place_heads)(Heads given) {
    SHARED_MEMORY(shared);  // with ``block``: [WARPS, rounds, 32] pairs
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
    if (given.block) {
        const int rounds = (pairs + 31) / 32, bytes = given.dim / 2;
        Pair *turning = reinterpret_cast<Pair *>(shared) + (threadIdx.x >> 5) * (32 * rounds);
        for (int round = 0; round < rounds; round++) {
            const int pair = 32 * round + lane;
            turning[pair] = pair < pairs ? placed(pair) : Pair{0.0f, 0.0f};
        }
        turn_pairs(turning, rounds, given.block, given.block_scale, lane);
        u8 *codes = static_cast<u8 *>(given.pool), *rests = given.rests, *more = nullptr;
        if (rests) rests += (row * given.entries + entry) * bytes;
        if (given.rest_slots)
            more = codes + (static_cast<u64>(given.rest_slots[row]) * given.entries + entry) * bytes;
        u8 *scales = static_cast<u8 *>(given.scales) + vector * (given.dim / 32);
        write_four_bits(turning, rounds, given.dim, codes + vector * bytes, scales, rests, more, lane);
        return;
    }
    u32 highest = 0;
    for (int pair = lane; pair < pairs; pair += 32) highest = greater(highest, size_of(placed(pair)));
    for (int apart = 1; apart < 32; apart *= 2) highest = greater(highest, other_lane_bits(highest, apart));
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
    if (lane == 0) static_cast<u16 *>(given.scales)[vector] = bits;
}
