// Products of rows with tiles of a weight, packed (packed.cu) or of bf16 (wide.cu).
//
// A block has 8 warps: ``warps_down`` of them take a row tile each, and the others share its input tiles. ``chunk``
// inputs, a multiple of 128 * (8 / warps_down), are staged at a time. Partial sums meet in shared memory, always in the
// same order. So a result depends on ``warps_down`` and ``splits``, but neither on ``chunk`` nor on the place of its row.
//
// The largest product stages FIXED_CHUNK inputs of all its columns, so that two blocks share a multiprocessor. ``splits``
// of its blocks may share the inputs of row tiles; ``add_splits`` adds their sums, in the order of the inputs.

// Copy inputs [first, first + chunk) of a job's rows to shared memory; inputs beyond in_features are zero.
template <typename Job>
DEVICE void stage_inputs(
    unsigned char *inputs, int pitch, const Job &job, int rows, int first, int chunk, int in_features) {
    const int runs = chunk / 8;  // of 16 bytes
    for (int index = threadIdx.x; index < rows * runs; index += blockDim.x) {
        const int row = index / runs, run = index % runs, input = first + 8 * run;
        uint4 found = make_uint4(0, 0, 0, 0);
        if (input < in_features) found = *reinterpret_cast<const uint4 *>(job.inputs(row) + input);
        *reinterpret_cast<uint4 *>(inputs + row * pitch + 16 * run) = found;
    }
}

#if OFFSET == 3
// Sum the staged inputs of each segment.
DEVICE void sum_segments(float *sums, int columns, const unsigned char *inputs, int pitch, int rows, int chunk) {
    for (int index = threadIdx.x; index < rows * (chunk / SEGMENT); index += blockDim.x) {
        const int row = index % rows, segment = index / rows;
        const uint2 *from = reinterpret_cast<const uint2 *>(inputs + row * pitch + 2 * SEGMENT * segment);
        float total = 0.0f;
#pragma unroll
        for (int part = 0; part < SEGMENT / 4; part++) {
            const uint2 four = from[part];
            total += bits_as_float(four.x << 16) + bits_as_float(four.x & 0xFFFF0000u);
            total += bits_as_float(four.y << 16) + bits_as_float(four.y & 0xFFFF0000u);
        }
        sums[segment * columns + row] = total;
    }
}
#endif

// One value of a block's product, by its place among those of a row tile.
struct Place {
    int down;     // row tile of the block
    int feature;  // within the row tile
    int row;
    int index;  // of the partial sums
};

template <int COLUMN_TILES>
DEVICE Place place_of(int index) {
    const int within = index % (COLUMN_TILES * 128);
    const int g = (within & 31) >> 2, t = within & 3, tile = within >> 7, part = within >> 5 & 3;
    return {index / (COLUMN_TILES * 128), g + 8 * (part >> 1), 8 * tile + 2 * t + (part & 1), within};
}

// Sum what the warps that share row tile ``down`` found for a place.
template <int COLUMN_TILES>
DEVICE float total_of(const float *partial, int warps_down, int down, int index) {
    const int sharing = WARPS / warps_down;
    float total = 0.0f;
    for (int share = 0; share < sharing; share++) total += partial[(down * sharing + share) * COLUMN_TILES * 128 + index];
    return total;
}

// The activation of a gate and an up product, in float32.
DEVICE float activated(float gate, float up, int activation) {
    if (activation == 1) {  // gelu, tanh's approximation
        const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
        return 0.5f * gate * (1.0f + tanhf(inner)) * up;
    }
    if (activation == 2) {  // gpt-oss
        gate = gate > 7.0f ? 7.0f : gate;
        up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
        return gate / (1.0f + expf(-1.702f * gate)) * (up + 1.0f);
    }
    return gate / (1.0f + expf(-gate)) * up;  // silu
}

// Multiply up to 8 * COLUMN_TILES rows of a job by its row tiles; return partial sums [warps, 4 * COLUMN_TILES, 32].
//
// A job has ``inputs(row)``, a row's inputs, and ``row_tile(down)``, a tile of the weight or -1. Input tiles begin to
// end are multiplied. PARTLY: fewer rows than columns are usual, so column tiles without rows are left out.
template <int COLUMN_TILES, bool PARTLY, typename Job>
DEVICE const float *multiply_rows(
    const Weight &weight, const Job &job, int rows, int begin, int end, int given_chunk, int warps_down,
    unsigned char *shared) {
    constexpr bool fixed = COLUMN_TILES == MOST_COLUMN_TILES;
    const int chunk = fixed ? FIXED_CHUNK : given_chunk;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int sharing = WARPS / warps_down, share = warp % sharing;
    const int row_tile = job.row_tile(warp / sharing);
    const bool active = row_tile >= 0;
    u32 *table = reinterpret_cast<u32 *>(shared);
    unsigned char *inputs = shared + TABLE_BYTES;
    const int pitch = 2 * chunk + 32;
    float *totals = reinterpret_cast<float *>(inputs + (fixed ? 8 * COLUMN_TILES : rows) * pitch);
    const Staged staged = {inputs, pitch, totals, rows};
    float sums[COLUMN_TILES][4] = {};
    TilePart next;
    if (active && begin + share < end) next.load(weight, row_tile, begin + share, lane);
    fill_table(table);
    for (int start = begin; start < end; start += chunk / TILE_INPUTS) {
        synchronise();  // the last chunk is used
        stage_inputs(inputs, pitch, job, rows, start * TILE_INPUTS, chunk, weight.in_features);
        synchronise();
#if OFFSET == 3
        sum_segments(totals, 8 * COLUMN_TILES, inputs, pitch, rows, chunk);
        synchronise();
#endif
        const int chunk_end = min(start + chunk / TILE_INPUTS, end);
        for (int tile = start + share; active && tile < chunk_end; tile += sharing) {
            const TilePart part = next;
            if (tile + sharing < end) next.load(weight, row_tile, tile + sharing, lane);
            multiply_part<COLUMN_TILES, PARTLY>(
                sums, weight, part, staged, (tile - start) * TILE_INPUTS, table, lane);
        }
    }
    synchronise();
    float *partial = reinterpret_cast<float *>(shared);
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
        for (int part = 0; part < 4; part++)
            partial[(warp * COLUMN_TILES * 4 + 4 * tile + part) * 32 + lane] = sums[tile][part];
    synchronise();
    return partial;
}

#if !EXPERTS

// Consecutive rows, and row tiles by block.
struct AllRows {
    const u16 *x;
    int x_stride;
    int tiles;  // of each part
    int apart;  // row tiles from a gate to its up; 0: one part
    int warps_down;
    int row_block;

    DEVICE const u16 *inputs(int row) const { return x + static_cast<u64>(row) * x_stride; }

    // With gates and ups, even warps take gates and odd ones their ups.
    DEVICE int row_tile(int down) const {
        const int parts = apart ? 2 : 1;
        const int tile = (row_block * warps_down + down) / parts;
        return tile < tiles ? tile + (down % parts) * apart : -1;
    }
};

// Where results go, and what is done to them; see affine_mm.
struct Results {
    u16 *out;
    int out_stride;
    const u16 *bias;
    int add;
    int activation;
};

// Write the result of a place; ``total(down)``: its sum in row tile ``down`` of the block.
template <typename Total>
DEVICE void write_result(
    const Weight &weight, const Results &results, int rows, int row_block, int warps_down, const Place &place,
    const Total &total_in) {
    const bool gated = results.activation >= 0;
    const int parts = gated ? 2 : 1, features = weight.out_features / parts;
    const int column = (row_block * (warps_down / parts) + place.down) * TILE_ROWS + place.feature;
    if (place.row >= rows || column >= features) return;
    float total = total_in(parts * place.down);
    u16 *to = results.out + static_cast<u64>(place.row) * results.out_stride + column;
    if (results.bias) total += bf16_as_float(results.bias[column]);
    if (gated) {
        float up = total_in(2 * place.down + 1);
        if (results.bias) up += bf16_as_float(results.bias[features + column]);
        total = activated(total, up, results.activation);
    }
    if (results.add) total += bf16_as_float(*to);
    *to = float_as_bf16(total);
}

// Write out[row, o] = x[row] . weight[o] (+ bias[o]) (+ out[row, o]) in bf16, for up to 8 * COLUMN_TILES rows.
// With ``activation`` >= 0, the weight holds gates, then as many ups, in whole row tiles; out is their activation.
//
// With several splits, write the sums of each split's inputs to sums [splits, row blocks, warps_down, 128 * COLUMN_TILES].
template <int COLUMN_TILES>
DEVICE void affine_mm(
    const Weight &weight, const u16 *x, int x_stride, int rows, const Results &results, int chunk, int warps_down,
    float *sums, int given_splits, unsigned char *shared) {
    constexpr bool is_largest = COLUMN_TILES == MOST_COLUMN_TILES;
    const int splits = is_largest ? given_splits : 1;
    const bool gated = results.activation >= 0;
    const int parts = gated ? 2 : 1, row_blocks = gridDim.x / splits;
    const int row_block = is_largest ? blockIdx.x % row_blocks : blockIdx.x, split = is_largest ? blockIdx.x / row_blocks : 0;
    const AllRows job = {
        x, x_stride, weight.row_tiles / parts, gated ? weight.row_tiles / 2 : 0, warps_down, row_block};
    const int begin = weight.input_tiles * split / splits, end = weight.input_tiles * (split + 1) / splits;
    const float *partial =
        multiply_rows<COLUMN_TILES, is_largest>(weight, job, rows, begin, end, chunk, warps_down, shared);
    constexpr int PLACES = COLUMN_TILES * 128;
    if (splits > 1) {
        float *to = sums + static_cast<u64>(blockIdx.x) * warps_down * PLACES;
        for (int index = threadIdx.x; index < warps_down * PLACES; index += blockDim.x)
            to[index] = total_of<COLUMN_TILES>(partial, warps_down, index / PLACES, index % PLACES);
        return;
    }
    for (int index = threadIdx.x; index < warps_down / parts * PLACES; index += blockDim.x) {
        const Place place = place_of<COLUMN_TILES>(index);
        write_result(weight, results, rows, row_block, warps_down, place, [&](int down) {
            return total_of<COLUMN_TILES>(partial, warps_down, down, place.index);
        });
    }
}

// Add the sums of the largest product's splits, in their order, and write the results. A thread takes a place.
KERNEL(add_splits)(Weight weight, int rows, Results results, int warps_down, const float *sums, int splits, int row_blocks) {
    constexpr int PLACES = MOST_COLUMN_TILES * 128;
    const int parts = results.activation >= 0 ? 2 : 1, of_block = warps_down / parts * PLACES;
    const int index = blockIdx.x * blockDim.x + threadIdx.x, row_block = index / of_block;
    const Place place = place_of<MOST_COLUMN_TILES>(index % of_block);
    write_result(weight, results, rows, row_block, warps_down, place, [&](int down) {
        float total = 0.0f;
        for (int split = 0; split < splits; split++)
            total += sums[(static_cast<u64>(split * row_blocks + row_block) * warps_down + down) * PLACES + place.index];
        return total;
    });
}

#define AFFINE_MM(DECLARE, COLUMN_TILES)                                                                            \
    DECLARE(affine_mm_##COLUMN_TILES)(                                                                              \
        Weight weight, const u16 *x, int x_stride, int rows, Results results, int chunk, int warps_down, float *sums, \
        int splits) {                                                                                               \
        SHARED_MEMORY(shared);                                                                                      \
        affine_mm<COLUMN_TILES>(weight, x, x_stride, rows, results, chunk, warps_down, sums, splits, shared);       \
    }

#if BITS < 8 && GROUP != 16  // other forms would spill
AFFINE_MM(KERNEL_OF_FOUR, 1)
#else
AFFINE_MM(KERNEL, 1)
#endif
AFFINE_MM(KERNEL, 2)
AFFINE_MM(KERNEL, 4)
AFFINE_MM(KERNEL_OF_TWO, 8)

#endif
