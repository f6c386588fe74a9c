// What the step kernels of recurrent layers share: one token of each of some rows, behind the states in their slots.
//
// TAPS inputs make an output of a convolution, the token's own included. WIDE_ROWS: rows are float32, else bf16. States
// are float32. No row writes to a slot that another row reads or writes, but the surplus rows of a graph, which all write
// to a slot that no row reads.

#if WIDE_ROWS
typedef float Number;
DEVICE float as_float(Number value) { return value; }
DEVICE Number as_number(float value) { return value; }
#else
typedef u16 Number;
DEVICE float as_float(Number value) { return bf16_as_float(value); }
DEVICE Number as_number(float value) { return float_as_bf16(value); }
#endif

struct Rows {
    const Number *made;      // [N, ..] results of the input product, ``made_stride`` from row to row
    const long long *read;   // [N] slots
    const long long *write;  // [N] slots
    int made_stride;
    int count;  // N
};

struct Convolution {
    const float *weight;  // [channels, TAPS], the token's own last
    const float *bias;    // [channels], or null
    float *last;          // [slots, TAPS - 1, channels], oldest first
    int channels;
};

// Heads with a matrix each, of DeltaNet or Mamba-2.
struct Heads {
    const float *dt_bias;  // [heads]
    const float *rates;    // [heads] exp(A_log)
    const float *skips;    // [heads] D; Mamba-2 only
    const float *norm;     // [VALUE_DIM]; Mamba-2: [heads * HEAD_DIM]
    float *memory;         // [slots, heads, rows of a matrix, its columns]
    int heads;
    int groups;  // of heads that share keys and queries, or B and C
    int tiled;   // head h is in group h % groups, else in h / (heads / groups)
    float eps;   // of the norm
    float low;   // limits of Mamba-2's dt
    float high;
};

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

DEVICE float silu(float x) { return x * sigmoid(x); }

DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

DEVICE float sum_of_warp(float value) {
    for (int apart = 16; apart; apart /= 2) value += other_lane(value, apart);
    return value;
}

template <int COUNT>
DEVICE void load_floats(float (&to)[COUNT], const float *from) {
    if constexpr (COUNT % 4 == 0) {
        for (int part = 0; part < COUNT; part += 4) {
            const uint4 found = reinterpret_cast<const uint4 *>(from)[part / 4];
            to[part] = bits_as_float(found.x), to[part + 1] = bits_as_float(found.y);
            to[part + 2] = bits_as_float(found.z), to[part + 3] = bits_as_float(found.w);
        }
    } else {
        for (int part = 0; part < COUNT; part++) to[part] = from[part];
    }
}

template <int COUNT>
DEVICE void store_floats(float *to, const float (&from)[COUNT]) {
    if constexpr (COUNT % 4 == 0) {
        for (int part = 0; part < COUNT; part += 4)
            reinterpret_cast<uint4 *>(to)[part / 4] = make_uint4(
                float_as_bits(from[part]), float_as_bits(from[part + 1]), float_as_bits(from[part + 2]),
                float_as_bits(from[part + 3]));
    } else {
        for (int part = 0; part < COUNT; part++) to[part] = from[part];
    }
}

// Convolve a channel's input behind the last ones, and keep it in place of the oldest.
DEVICE float convolve(const Convolution &by, const Rows &rows, int row, int channel, float input) {
    const u64 slot = static_cast<u64>(TAPS - 1) * by.channels;
    const float *from = by.last + rows.read[row] * slot + channel;
    float seen[TAPS];
    for (int tap = 0; tap < TAPS - 1; tap++) seen[tap] = from[tap * by.channels];
    seen[TAPS - 1] = input;
    float *to = by.last + rows.write[row] * slot + channel;
    float sum = by.bias ? by.bias[channel] : 0.0f;
    for (int tap = 0; tap < TAPS; tap++) {
        sum += seen[tap] * by.weight[channel * TAPS + tap];
        if (tap) to[(tap - 1) * by.channels] = seen[tap];
    }
    return sum;
}

// Convolve the channels that begin at number ``first`` of a row, then SiLU: mixed [N, channels].
KERNEL(convolve_step)(Rows rows, Convolution by, int first, float *mixed) {
    const int all = rows.count * by.channels;
    for (int index = blockIdx.x * blockDim.x + threadIdx.x; index < all; index += gridDim.x * blockDim.x) {
        const int row = index / by.channels, channel = index % by.channels;
        const Number *own = rows.made + static_cast<u64>(row) * rows.made_stride + first;
        mixed[index] = silu(convolve(by, rows, row, channel, as_float(own[channel])));
    }
}
