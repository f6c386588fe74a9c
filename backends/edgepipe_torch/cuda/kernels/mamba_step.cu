// One token of Mamba-2 heads (``Mamba2`` of layer_spec.py), behind ``convolve_step``.
//
// A block has a row's head with its matrix [HEAD_DIM, STATE_DIM]. Warp w has the matrix' rows w, w + 8, .., and a lane
// COLUMNS of each: an output is a sum over one warp. HEAD_DIM is a multiple of 8, STATE_DIM of 32.

#define DEPTH (HEAD_DIM / WARPS)
#define COLUMNS (STATE_DIM / 32)

// mixed [N, channels]: x, B and C. A row's results of the input product: z, as many channels, dt. The heads' outputs go to
// summed [N, heads HEAD_DIM]. Block: row * heads + head.
KERNEL(mamba_step)(Rows rows, Heads by, const float *mixed, float *summed) {
    const int row = blockIdx.x / by.heads, head = blockIdx.x % by.heads;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float *from = by.memory + (rows.read[row] * by.heads + head) * (HEAD_DIM * STATE_DIM) + lane * COLUMNS;
    float memory[DEPTH][COLUMNS];
#pragma unroll
    for (int depth = 0; depth < DEPTH; depth++) load_floats(memory[depth], from + (warp + WARPS * depth) * STATE_DIM);
    const int width = by.heads * HEAD_DIM, channels = width + 2 * by.groups * STATE_DIM;
    const float *own = mixed + static_cast<u64>(row) * channels;
    const int group = head / (by.heads / by.groups);
    float into[COLUMNS], out_of[COLUMNS];
    load_floats(into, own + width + group * STATE_DIM + lane * COLUMNS);
    load_floats(out_of, own + width + (by.groups + group) * STATE_DIM + lane * COLUMNS);
    const Number *steps = rows.made + static_cast<u64>(row) * rows.made_stride + width + channels;
    float step = softplus(as_float(steps[head]) + by.dt_bias[head]);
    step = step < by.low ? by.low : step > by.high ? by.high : step;
    const float decay = expf(-by.rates[head] * step);
    float *to = by.memory + (rows.write[row] * by.heads + head) * (HEAD_DIM * STATE_DIM) + lane * COLUMNS;
#pragma unroll
    for (int depth = 0; depth < DEPTH; depth++) {
        const int at = warp + WARPS * depth;
        const float x = own[head * HEAD_DIM + at];
        float sum = 0.0f;
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
            memory[depth][column] = memory[depth][column] * decay + x * step * into[column];
            sum += memory[depth][column] * out_of[column];
        }
        store_floats(to + at * STATE_DIM, memory[depth]);
        sum = sum_of_warp(sum);
        if (lane == 0) summed[static_cast<u64>(row) * width + head * HEAD_DIM + at] = sum + x * by.skips[head];
    }
}

// Multiply the heads' outputs with SiLU(z), and normalise each group. ``summed`` is overwritten. Block: row * groups +
// group.
KERNEL(gate_groups)(Rows rows, Heads by, float *summed, Number *out) {
    SHARED_MEMORY(shared);
    float *parts = reinterpret_cast<float *>(shared);  // [WARPS] sums of squares
    const int row = blockIdx.x / by.groups, size = by.heads * HEAD_DIM / by.groups;
    const u64 first = static_cast<u64>(blockIdx.x) * size;
    const int in_row = blockIdx.x % by.groups * size;
    const Number *gates = rows.made + static_cast<u64>(row) * rows.made_stride + in_row;
    float squares = 0.0f;
    for (int at = threadIdx.x; at < size; at += blockDim.x) {
        const float gated = summed[first + at] * silu(as_float(gates[at]));
        summed[first + at] = gated;
        squares += gated * gated;
    }
    squares = sum_of_warp(squares);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = squares;
    synchronise();
    squares = 0.0f;
    for (int warp = 0; warp < WARPS; warp++) squares += parts[warp];
    const float factor = 1.0f / sqrtf(squares / size + by.eps);
    for (int at = threadIdx.x; at < size; at += blockDim.x)
        out[first + at] = as_number(summed[first + at] * factor * by.norm[in_row + at]);
}
