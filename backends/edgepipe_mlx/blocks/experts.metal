// Body of the kernel for rows with an expert each: x [T, I], where T divides N, experts [N], words [E, O, n], factors and bases
// [E * O, m], y [N, O]. A thread's position: lane, row of y, tile of FEATURES out features.
const int row = int(thread_position_in_grid.y), feature = int(thread_position_in_grid.z) * FEATURES;
const int inputs = x_shape[1], outputs = words_shape[1];
if (row < experts_shape[0] && feature < outputs) {
    const size_t block = (size_t(experts[row]) * outputs + feature) * (inputs / BLOCK_INPUTS);
    multiply_blocks<BITS, GROUP, ADDED, ZERO, 1, FEATURES>(
        x + size_t(row / (experts_shape[0] / x_shape[0])) * inputs,
        (const device ushort *)words + block * (BLOCK_INPUTS * BITS / 16),
        factors + block * (BLOCK_INPUTS / GROUP * (1 + ADDED)),
        bases + block * (1 + ADDED),
        y + size_t(row) * outputs + feature,
        inputs,
        1,
        outputs - feature,
        outputs,
        int(thread_position_in_grid.x));
}
