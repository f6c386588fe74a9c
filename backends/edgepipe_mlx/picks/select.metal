// Selection of the most likely tokens of a row of logits, exactly: equal logits by ascending id.
//
// Each thread of a threadgroup owns OWN tokens, whose keys order as their logits do. The threadgroup finds the least key
// of those taken bit by bit, from the highest: it counts the keys that reach the key with one bit more. Where too many
// tokens have this key, it finds the bound of their ids in the same way.

constant constexpr int LANES = 32;
constant constexpr uint NO_TOKEN = 0;             // a key below all others
constant constexpr uint ZERO = 0x80000000u;       // of 0 and of -0
constant constexpr uint NO_NUMBER = 0xFFFFFFFFu;  // above all numbers, as numpy ranks it
constant constexpr uint FORBIDDEN = 0x007FFFFFu;  // of -infinity
constant constexpr int HIGHEST_BIT_OF_IDS = 1 << 23;
constant constexpr int ALL_IDS = 0x7FFFFFFF;

inline uint key_of(float value) {
    const uint bits = as_type<uint>(value), size = bits & 0x7FFFFFFFu;
    if (size > 0x7F800000u) return NO_NUMBER;
    if (size == 0) return ZERO;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

inline float value_of(uint key) { return as_type<float>(key >> 31 ? key & 0x7FFFFFFFu : ~key); }

// Sums over a threadgroup, each with one barrier: two in a row use different places.
template <int THREADS>
struct Sums {
    threadgroup uint *places;  // [2 * THREADS / LANES]
    int thread_index;
    int turn;

    // Let each simdgroup leave a number, and return the place of the first one.
    threadgroup uint *leave(uint number, int lane) {
        turn ^= 1;
        threadgroup uint *to = places + turn * (THREADS / LANES);
        if (thread_index % LANES == lane) to[thread_index / LANES] = number;
        metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        return to;
    }

    uint count(uint own) {
        const threadgroup uint *found = leave(metal::simd_sum(own), 0);
        uint all = 0;
        for (int each = 0; each < THREADS / LANES; each++) all += found[each];
        return all;
    }

    // Return the count of the threads before this one.
    uint before(uint own) {
        const uint earlier = metal::simd_prefix_exclusive_sum(own);
        const threadgroup uint *found = leave(earlier + own, LANES - 1);
        uint all = earlier;
        for (int each = 0; each < thread_index / LANES; each++) all += found[each];
        return all;
    }

    uint highest(uint own) {
        const threadgroup uint *found = leave(metal::simd_max(own), 0);
        uint best = NO_TOKEN;
        for (int each = 0; each < THREADS / LANES; each++) best = metal::max(best, found[each]);
        return best;
    }

    float total(float own) {
        const threadgroup uint *found = leave(as_type<uint>(metal::simd_sum(own)), 0);
        float all = 0.0f;
        for (int each = 0; each < THREADS / LANES; each++) all += as_type<float>(found[each]);
        return all;
    }
};

// Tokens with a higher key are taken, and those of this key with an id below this one.
struct Cut {
    uint key;
    int id;

    bool takes(uint other, int other_id) const { return other > key || (other == key && other_id < id); }
};

// Return the cut that takes COUNT of the OWN * THREADS tokens. Ids of one key differ.
template <int COUNT, int OWN, int THREADS, typename Ids>
Cut cut_of(const thread uint *keys, Ids ids, thread Sums<THREADS> &sums) {
    Cut cut = {NO_TOKEN, ALL_IDS};
    uint taken = OWN * THREADS;
    for (uint bit = 1u << 31; bit && taken != COUNT; bit >>= 1) {
        uint own = 0;
        #pragma unroll
        for (int index = 0; index < OWN; index++) own += keys[index] >= (cut.key | bit);
        const uint reached = sums.count(own);
        if (reached >= COUNT) cut.key |= bit, taken = reached;
    }
    if (taken == COUNT) return cut;
    cut.id = 0;
    for (int bit = HIGHEST_BIT_OF_IDS; bit; bit >>= 1) {
        const Cut further = {cut.key, cut.id | bit};
        uint own = 0;
        #pragma unroll
        for (int index = 0; index < OWN; index++) own += further.takes(keys[index], ids.at(index));
        if (sums.count(own) <= COUNT) cut.id = further.id;
    }
    return cut;
}

// Ids of a thread's tokens in a part of a row.
template <int THREADS>
struct PartIds {
    int first;

    int at(int index) const { return first + index * THREADS; }
};

// Tokens that the parts of a row leave: of each part COUNT keys, COUNT ids, and its ENDS.
constant constexpr int ENDS = 4;

template <int COUNT, int THREADS>
struct LeftTokens {
    const device uint *left;
    int first;
    int parts;

    bool has(int index) const { return (first + index * THREADS) / COUNT < parts; }

    const device uint *token(int index) const {
        const int place = first + index * THREADS;
        return left + place / COUNT * (2 * COUNT + ENDS) + place % COUNT;
    }

    uint key(int index) const { return has(index) ? token(index)[0] : NO_TOKEN; }
    int at(int index) const { return has(index) ? int(token(index)[COUNT]) : ALL_IDS; }
};

// Return the sum of exponentials of the distances to the highest logit.
template <int OWN>
float exponentials(const thread uint *keys, uint highest, float temperature) {
    float sum = 0.0f;
    #pragma unroll
    for (int index = 0; index < OWN; index++)
        if (keys[index] > FORBIDDEN)
            sum += metal::exp((value_of(keys[index]) - value_of(highest)) / temperature);
    return sum;
}
