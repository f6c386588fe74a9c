// One token of gated DeltaNet heads (``DeltaNet`` of layer_spec.py), behind ``convolve_step``.
//
// A block has a row's head with its matrix [KEY_DIM, VALUE_DIM]. Warp w has the matrix' rows w, w + 8, .., and a lane
// COLUMNS of each. So a thread reads its part once, holds it in registers, and writes it once; only sums over the rows
// pass through shared memory. KEY_DIM is a multiple of 8, VALUE_DIM of 32.

#define DEPTH (KEY_DIM / WARPS)
#define COLUMNS (VALUE_DIM / 32)
#define LENGTH_EPS 1e-6f  // of the length of queries and keys

// The sum of the warps' parts [WARPS, VALUE_DIM] in a lane's columns.
DEVICE void sum_parts(float (&sums)[COLUMNS], const float *parts, int lane) {
    for (int column = 0; column < COLUMNS; column++) {
        sums[column] = 0.0f;
        for (int warp = 0; warp < WARPS; warp++) sums[column] += parts[warp * VALUE_DIM + lane * COLUMNS + column];
    }
}

// mixed [N, 2 groups KEY_DIM + heads VALUE_DIM]: queries, keys and values. A row's results of the input product have as
// many channels, then z, beta and alpha. Block: row * heads + head.
KERNEL(delta_step)(Rows rows, Heads by, const float *mixed, Number *out) {
    SHARED_MEMORY(shared);
    float *query = reinterpret_cast<float *>(shared);  // [KEY_DIM]
    float *key = query + KEY_DIM;                      // [KEY_DIM]
    float *guesses = key + KEY_DIM;                    // [WARPS, VALUE_DIM] of what the memory has for the key
    float *answers = guesses + WARPS * VALUE_DIM;      // [WARPS, VALUE_DIM] of what it has for the query
    const int row = blockIdx.x / by.heads, head = blockIdx.x % by.heads;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float *from = by.memory + (rows.read[row] * by.heads + head) * (KEY_DIM * VALUE_DIM) + lane * COLUMNS;
    float memory[DEPTH][COLUMNS];
#pragma unroll
    for (int depth = 0; depth < DEPTH; depth++) load_floats(memory[depth], from + (warp + WARPS * depth) * VALUE_DIM);
    const int group = by.tiled ? head % by.groups : head / (by.heads / by.groups);
    const int channels = 2 * by.groups * KEY_DIM + by.heads * VALUE_DIM;
    const float *own = mixed + static_cast<u64>(row) * channels;
    if (warp < 2) {  // one for the query, one for the key
        const float *source = own + (warp * by.groups + group) * KEY_DIM;
        float *to = warp ? key : query, squares = 0.0f;
        for (int at = lane; at < KEY_DIM; at += 32) squares += source[at] * source[at];
        const float length = sqrtf(sum_of_warp(squares) + LENGTH_EPS);
        const float factor = warp ? 1.0f / length : 1.0f / (length * sqrtf(static_cast<float>(KEY_DIM)));
        for (int at = lane; at < KEY_DIM; at += 32) to[at] = source[at] * factor;
    }
    const Number *gates = rows.made + static_cast<u64>(row) * rows.made_stride + channels;
    const int width = by.heads * VALUE_DIM;
    const float beta = sigmoid(as_float(gates[width + head]));
    const float decay =
        expf(-by.rates[head] * softplus(as_float(gates[width + by.heads + head]) + by.dt_bias[head]));
    synchronise();
    float found[COLUMNS] = {};
#pragma unroll
    for (int depth = 0; depth < DEPTH; depth++)
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
            memory[depth][column] *= decay;
            found[column] += key[warp + WARPS * depth] * memory[depth][column];
        }
    store_floats(guesses + warp * VALUE_DIM + lane * COLUMNS, found);
    synchronise();
    float error[COLUMNS], wanted[COLUMNS];
    sum_parts(error, guesses, lane);
    load_floats(wanted, own + 2 * by.groups * KEY_DIM + head * VALUE_DIM + lane * COLUMNS);
    for (int column = 0; column < COLUMNS; column++) {
        error[column] = (wanted[column] - error[column]) * beta;
        found[column] = 0.0f;
    }
    float *to = by.memory + (rows.write[row] * by.heads + head) * (KEY_DIM * VALUE_DIM) + lane * COLUMNS;
#pragma unroll
    for (int depth = 0; depth < DEPTH; depth++) {
        const int at = warp + WARPS * depth;
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
            memory[depth][column] += key[at] * error[column];
            found[column] += query[at] * memory[depth][column];
        }
        store_floats(to + at * VALUE_DIM, memory[depth]);
    }
    store_floats(answers + warp * VALUE_DIM + lane * COLUMNS, found);
    synchronise();
    if (warp) return;
    sum_parts(found, answers, lane);
    float squares = 0.0f;
    for (int column = 0; column < COLUMNS; column++) squares += found[column] * found[column];
    const float factor = 1.0f / sqrtf(sum_of_warp(squares) / VALUE_DIM + by.eps);
    for (int column = 0; column < COLUMNS; column++) {
        const int at = lane * COLUMNS + column, place = head * VALUE_DIM + at;
        out[static_cast<u64>(row) * width + place] =
            as_number(found[column] * factor * by.norm[at] * silu(as_float(gates[place])));
    }
}
