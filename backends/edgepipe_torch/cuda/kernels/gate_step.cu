// One token of short convolutions (``ShortConv`` of layer_spec.py): out = C conv(B x), with B, C and x side by side.

KERNEL(gate_step)(Rows rows, Convolution by, Number *out) {
    const int all = rows.count * by.channels;
    for (int index = blockIdx.x * blockDim.x + threadIdx.x; index < all; index += gridDim.x * blockDim.x) {
        const int row = index / by.channels, channel = index % by.channels;
        const Number *own = rows.made + static_cast<u64>(row) * rows.made_stride + channel;
        const float input = as_float(own[0]) * as_float(own[2 * by.channels]);
        out[index] = as_number(as_float(own[by.channels]) * convolve(by, rows, row, channel, input));
    }
}
