// Body of the kernel for rows: x [T, I], words [O, n], factors and bases [O, m], y [T, O].
// A thread's position: lane, tile of ROWS rows, tile of FEATURES out features.
const int row = int(thread_position_in_grid.y) * ROWS, feature = int(thread_position_in_grid.z) * FEATURES;
const int inputs = x_shape[1], rows = x_shape[0] - row, outputs = words_shape[0];
if (rows > 0 && feature < outputs) {
    const size_t block = size_t(feature) * (inputs / BLOCK_INPUTS);
    multiply_blocks<BITS, GROUP, ADDED, ZERO, ROWS, FEATURES>(
        x + size_t(row) * inputs,
        (const device ushort *)words + block * (BLOCK_INPUTS * BITS / 16),
        factors + block * (BLOCK_INPUTS / GROUP * (1 + ADDED)),
        bases + block * (1 + ADDED),
        y + size_t(row) * outputs + feature,
        inputs,
        rows,
        outputs - feature,
        outputs,
        int(thread_position_in_grid.x));
}
