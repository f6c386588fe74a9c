// Body of the kernel that weighs shares: parts [rows, HEADS, shares, WIDTH + 2] as the kernel of shares leaves them,
// sinks [HEADS], y [rows, HEADS, WIDTH]. A thread's position: lane, head, row. At most LANES shares.
constexpr int LANES = 32;
constexpr float LOWEST = -3.0e38f;
const int lane = int(thread_position_in_grid.x), head = int(thread_position_in_grid.y);
const int shares = parts_shape[2];
const size_t row = size_t(thread_position_in_grid.z) * HEADS + head;
const device float *own = parts + row * shares * (WIDTH + 2);
float highest = LOWEST, total = 0.0f;
if (lane < shares) highest = own[lane * (WIDTH + 2) + WIDTH], total = own[lane * (WIDTH + 2) + WIDTH + 1];
const bool empty = total == 0.0f;  // no key of the share is seen
float best = metal::simd_max(highest);
if (SINKS) best = metal::max(best, float(sinks[head]));
const float weight = empty ? 0.0f : metal::exp(highest - best);
float all = metal::simd_sum(total * weight);
if (SINKS) all += metal::exp(float(sinks[head]) - best);
constexpr int OF_LANE = (WIDTH + LANES - 1) / LANES;
float sums[OF_LANE];
#pragma unroll
for (int index = 0; index < OF_LANE; index++) sums[index] = 0.0f;
for (int share = 0; share < shares; share++) {
    const float factor = metal::simd_shuffle(weight, ushort(share));
    if (factor == 0.0f) continue;
    #pragma unroll
    for (int index = 0; index < OF_LANE; index++) {
        const int place = index * LANES + lane;
        if (place < WIDTH) sums[index] = metal::fma(factor, own[share * (WIDTH + 2) + place], sums[index]);
    }
}
#pragma unroll
for (int index = 0; index < OF_LANE; index++)
    if (index * LANES + lane < WIDTH) y[row * WIDTH + index * LANES + lane] = Y(sums[index] / all);
