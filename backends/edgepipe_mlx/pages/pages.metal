// Attention of a few new tokens of each sequence over pages.
//
// A threadgroup has one sequence, one key head, QUERIES of the queries that share it, and one share of the keys. Its
// simdgroups take BATCH keys each in turn. Their lanes own one key of the batch each: its slot, and its logits.
//
//     logits   four lanes read a key, CHUNK values at a time, and add their sums
//     values   as many lanes as a value has chunks read it, the other lanes read the next values
//
// Exponentials are of the distance to the highest logit so far. A share leaves its sum of values, the highest logit and
// the sum of exponentials; ``join`` weighs the shares. All sums are float32, and their order depends on nothing but the
// sequence's own length.

constant constexpr int LANES = 32;
constant constexpr int CHUNK = 8;      // values
constant constexpr int KEY_LANES = 4;  // lanes that share a key
constant constexpr int BATCH = 32;     // keys
constant constexpr int AT_ONCE = 2;    // keys of a lane for which it reads a query once
constant constexpr float LOWEST = -3.0e38f;

// Columns of the table of rows.
constant constexpr int FIRST_ROW = 0, COUNT = 1, LENGTH = 2, OUT_ROW = 3, FIRST_KEY = 4, SHARE = 5, SHARES = 6, TILES = 7;
constant constexpr int COLUMNS = 8;

constexpr int power_of_two(int least) {
    int found = 1;
    while (found < least) found *= 2;
    return found;
}

inline float low_bfloat(uint pair) { return as_type<float>(pair << 16); }
inline float high_bfloat(uint pair) { return as_type<float>(pair & 0xFFFF0000u); }

// Vectors of STRIDE values, one for each slot, with SCALES scales.
template <int STRIDE, int SCALES, typename K, typename S>
struct Vectors {
    const device K *all;
    const device S *scales;

    void read(size_t slot, int chunk, thread float *values) const {
        const device K *from = all + slot * STRIDE + chunk * CHUNK;
        #pragma unroll
        for (int index = 0; index < CHUNK; index++) values[index] = float(from[index]);
    }
};

template <int STRIDE, int SCALES, typename S>
struct Vectors<STRIDE, SCALES, bfloat16_t, S> {
    const device bfloat16_t *all;
    const device S *scales;

    void read(size_t slot, int chunk, thread float *values) const {
        const uint4 pairs = *(const device uint4 *)(all + slot * STRIDE + chunk * CHUNK);
        values[0] = low_bfloat(pairs.x), values[1] = high_bfloat(pairs.x);
        values[2] = low_bfloat(pairs.y), values[3] = high_bfloat(pairs.y);
        values[4] = low_bfloat(pairs.z), values[5] = high_bfloat(pairs.z);
        values[6] = low_bfloat(pairs.w), values[7] = high_bfloat(pairs.w);
    }
};

// Codes of 8 bits, and a scale for each vector.
template <int STRIDE, int SCALES, typename S>
struct Vectors<STRIDE, SCALES, int8_t, S> {
    const device int8_t *all;
    const device S *scales;

    void read(size_t slot, int chunk, thread float *values) const {
        const uint2 words = *(const device uint2 *)(all + slot * STRIDE + chunk * CHUNK);
        const float scale = float(scales[slot]);
        #pragma unroll
        for (int index = 0; index < 4; index++) {
            values[index] = float(int(words.x << (24 - 8 * index)) >> 24) * scale;
            values[index + 4] = float(int(words.y << (24 - 8 * index)) >> 24) * scale;
        }
    }
};

constant constexpr float MIDDLE = 7.5f;   // of codes of 4 bits
constant constexpr float STEPS = 16.0f;   // of the lower 4 bits of a code to one of the upper
constant constexpr int NO_SCALE = 255;    // of a group with a value that is no number
constant constexpr int LEAST_SCALE = (127 - 20) << 3, SCALE_SHIFT = 20;  // see kv_codes.py

// Values of a chunk of codes of 4 bits, in groups of GROUP. A byte has a value of a group's first half and its
// counterpart of the second.
template <int GROUP>
void read_codes(const device uint8_t *codes, const device uint8_t *scales, int chunk, float steps, thread float *values) {
    const int group = chunk * CHUNK / GROUP, within = chunk * CHUNK % GROUP, half_group = GROUP / 2;
    const device uint *from = (const device uint *)(codes + group * half_group + within % half_group);
    const int shift = within < half_group ? 0 : 4, code = scales[group];
    const float scale = (code == NO_SCALE ? NAN : as_type<float>(uint(code + LEAST_SCALE) << SCALE_SHIFT)) / steps;
    const uint first = from[0] >> shift, second = from[1] >> shift;
    #pragma unroll
    for (int index = 0; index < 4; index++) {
        values[index] = (float(first >> (8 * index) & 15u) - MIDDLE) * scale;
        values[index + 4] = (float(second >> (8 * index) & 15u) - MIDDLE) * scale;
    }
}

template <int STRIDE, int SCALES>
struct Vectors<STRIDE, SCALES, uint8_t, uint8_t> {
    const device uint8_t *all;
    const device uint8_t *scales;

    void read(size_t slot, int chunk, thread float *values) const {
        read_codes<STRIDE / SCALES>(all + slot * (STRIDE / 2), scales + slot * SCALES, chunk, 1.0f, values);
    }
};

// What the lower bits of the newest tokens add to their values, by the tokens' positions: nothing without such bits.
template <int STRIDE, int SCALES, int BLOCK, int REST, typename K, typename S>
struct Rests {
    const device K *all;
    const device S *scales;
    const device int *table;

    void read(size_t token, int chunk, thread float *values) const {}
};

template <int STRIDE, int SCALES, int BLOCK, int REST>
struct Rests<STRIDE, SCALES, BLOCK, REST, uint8_t, uint8_t> {
    const device uint8_t *all;
    const device uint8_t *scales;
    const device int *table;

    int slot_of(int token) const { return table[token / BLOCK] * BLOCK + token % BLOCK; }

    void read(size_t token, int chunk, thread float *values) const {
        const device uint8_t *rest = all + size_t(slot_of(int(token) + REST)) * (STRIDE / 2);
        const device uint8_t *own = scales + size_t(slot_of(int(token))) * SCALES;
        read_codes<STRIDE / SCALES>(rest, own, chunk, STEPS, values);
    }
};

// One share's logits and values, of a simdgroup.
template <int DIM, int WIDTH, int QUERIES>
struct Batches {
    enum : int {
        VALUE_LANES = WIDTH / CHUNK < LANES ? power_of_two(WIDTH / CHUNK) : LANES,
        PIECES = (WIDTH / CHUNK + VALUE_LANES - 1) / VALUE_LANES,  // chunks of a lane
        TOGETHER = LANES / VALUE_LANES                             // values read at once
    };
    float highest[QUERIES], totals[QUERIES];
    float sums[QUERIES][PIECES][CHUNK];

    void clear() {
        #pragma unroll
        for (int query = 0; query < QUERIES; query++) {
            highest[query] = LOWEST;
            totals[query] = 0.0f;
            #pragma unroll
            for (int piece = 0; piece < PIECES; piece++)
                #pragma unroll
                for (int index = 0; index < CHUNK; index++) sums[query][piece][index] = 0.0f;
        }
    }

    // Products of the queries with the lane's own key, which is in ``slot``.
    template <typename Keys>
    void multiply(const threadgroup float *asked, Keys keys, int slot, int lane, thread float *logits) const {
        const int part = lane % KEY_LANES;
        #pragma unroll
        for (int round = 0; round < BATCH * KEY_LANES / LANES; round += AT_ONCE) {
            int slots[AT_ONCE];
            float dots[QUERIES][AT_ONCE];
            #pragma unroll
            for (int each = 0; each < AT_ONCE; each++) {
                slots[each] = metal::simd_shuffle(slot, ushort(lane - part + round + each));
                #pragma unroll
                for (int query = 0; query < QUERIES; query++) dots[query][each] = 0.0f;
            }
            for (int chunk = part; chunk < DIM / CHUNK; chunk += KEY_LANES) {
                float values[AT_ONCE][CHUNK];
                #pragma unroll
                for (int each = 0; each < AT_ONCE; each++) keys.read(size_t(slots[each]), chunk, values[each]);
                #pragma unroll
                for (int query = 0; query < QUERIES; query++) {
                    const threadgroup float *own = asked + query * DIM + chunk * CHUNK;
                    #pragma unroll
                    for (int index = 0; index < CHUNK; index++)
                        #pragma unroll
                        for (int each = 0; each < AT_ONCE; each++)
                            dots[query][each] = metal::fma(own[index], values[each][index], dots[query][each]);
                }
            }
            #pragma unroll
            for (int query = 0; query < QUERIES; query++)
                #pragma unroll
                for (int each = 0; each < AT_ONCE; each++) {
                    float dot = dots[query][each];
                    dot += metal::simd_shuffle_xor(dot, ushort(1));
                    dot += metal::simd_shuffle_xor(dot, ushort(2));
                    if (part == round + each) logits[query] = dot;
                }
        }
    }

    // Make logits of the lane's own key weights; ``seen``: by query.
    void weigh(thread float *logits, const thread bool *seen) {
        #pragma unroll
        for (int query = 0; query < QUERIES; query++) {
            const float best = metal::max(highest[query], metal::simd_max(seen[query] ? logits[query] : LOWEST));
            const float before = metal::exp(highest[query] - best);
            logits[query] = seen[query] ? metal::exp(logits[query] - best) : 0.0f;
            highest[query] = best;
            totals[query] = totals[query] * before + logits[query];
            #pragma unroll
            for (int piece = 0; piece < PIECES; piece++)
                #pragma unroll
                for (int index = 0; index < CHUNK; index++) sums[query][piece][index] *= before;
        }
    }

    // Add ``count`` values, times the weights of the keys that the lanes own.
    template <typename Values>
    void add(const thread float *weights, Values values, int slot, int count, int lane) {
        const int part = lane % VALUE_LANES;
        for (int first = 0; first < count; first += TOGETHER) {
            const ushort owner = ushort(first + lane / VALUE_LANES);
            const size_t place = size_t(metal::simd_shuffle(slot, owner));
            float own[QUERIES];
            #pragma unroll
            for (int query = 0; query < QUERIES; query++) own[query] = metal::simd_shuffle(weights[query], owner);
            #pragma unroll
            for (int piece = 0; piece < PIECES; piece++) {
                const int chunk = piece * VALUE_LANES + part;
                if (chunk < WIDTH / CHUNK) {
                    float read[CHUNK];
                    values.read(place, chunk, read);
                    #pragma unroll
                    for (int query = 0; query < QUERIES; query++)
                        #pragma unroll
                        for (int index = 0; index < CHUNK; index++)
                            sums[query][piece][index] = metal::fma(own[query], read[index], sums[query][piece][index]);
                }
            }
        }
    }

    // Add up what the lanes have. The first VALUE_LANES lanes hold the sums.
    void gather() {
        #pragma unroll
        for (int query = 0; query < QUERIES; query++) {
            totals[query] = metal::simd_sum(totals[query]);
            #pragma unroll
            for (int apart = LANES / 2; apart >= VALUE_LANES; apart /= 2)
                #pragma unroll
                for (int piece = 0; piece < PIECES; piece++)
                    #pragma unroll
                    for (int index = 0; index < CHUNK; index++)
                        sums[query][piece][index] += metal::simd_shuffle_xor(sums[query][piece][index], ushort(apart));
        }
    }

    // Write the sums times factors, or add to what is there.
    void leave(threadgroup float *found, const thread float *factors, bool adds, int lane) const {
        #pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            const int chunk = piece * VALUE_LANES + lane;
            if (lane < VALUE_LANES && chunk < WIDTH / CHUNK) {
                #pragma unroll
                for (int query = 0; query < QUERIES; query++)
                    #pragma unroll
                    for (int index = 0; index < CHUNK; index++) {
                        threadgroup float *place = found + query * WIDTH + chunk * CHUNK + index;
                        const float value = sums[query][piece][index] * factors[query];
                        *place = adds ? *place + value : value;
                    }
            }
        }
    }
};
