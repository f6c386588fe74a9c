// Products with a mixture's experts, by pairs of a row and one of its experts.
//
// A weight holds the rows of all experts, expert by expert, each a whole number of row tiles; a weight with gates and ups
// holds all gates first. routing.cu sorts pairs by expert and cuts them to runs, each a few pairs of one expert. Blocks
// take a run and some of its expert's row tiles; blocks of runs that do not exist end at once. So one launch serves
// whatever experts the rows chose, and runs of one expert find its weights in the cache.

struct Runs {
    const int *order;  // pairs, sorted by expert; a pair's row is pair / used
    const int *runs;   // [runs, 3]: expert, first place in ``order``, count
    const int *count;  // [1]
};

// A run's pairs, and row tiles of its expert.
struct RunRows {
    const int *order;  // the run's first
    const u16 *x;      // [rows, x_stride]
    int x_stride;
    int each;        // pairs that read one row of x
    int first_tile;  // of the expert
    int tiles;       // of an expert, in each part
    int apart;       // row tiles from a gate to its up; 0: one part
    int block;       // among those of the run
    int warps_down;

    DEVICE const u16 *inputs(int row) const { return x + static_cast<u64>(order[row] / each) * x_stride; }

    // With gates and ups, even warps take gates and odd ones their ups.
    DEVICE int row_tile(int down) const {
        const int parts = apart ? 2 : 1;
        const int tile = (block * warps_down + down) / parts;
        return tile < tiles ? first_tile + tile + (down % parts) * apart : -1;
    }
};

// Write out[pair, o] = x[pair / each] . weight[expert, o] (+ bias[expert, o]) in bf16; with ``activation`` >= 0, that of
// gates and ups, o counting those. A run has up to 8 * COLUMN_TILES pairs.
template <int COLUMN_TILES, bool PARTLY>
DEVICE void expert_mm(
    const Weight &weight, const Runs &given, int experts, const u16 *x, int x_stride, int each, u16 *out,
    int out_stride, const u16 *bias, int activation, int blocks, int chunk, int warps_down, unsigned char *shared) {
    const int run = blockIdx.x / blocks, block = blockIdx.x % blocks;
    if (run >= *given.count) return;
    const int expert = given.runs[3 * run], count = given.runs[3 * run + 2];
    const int *order = given.order + given.runs[3 * run + 1];
    const bool gated = activation >= 0;
    const int parts = gated ? 2 : 1, tiles = weight.row_tiles / parts / experts;
    const RunRows job = {
        order, x, x_stride, each, expert * tiles, tiles, gated ? weight.row_tiles / 2 : 0, block, warps_down};
    const float *partial = multiply_rows<COLUMN_TILES, PARTLY>(
        weight, job, count, 0, weight.input_tiles, chunk, warps_down, shared);
    for (int index = threadIdx.x; index < warps_down / parts * COLUMN_TILES * 128; index += blockDim.x) {
        const Place place = place_of<COLUMN_TILES>(index);
        const int tile = block * (warps_down / parts) + place.down;
        if (place.row >= count || tile >= tiles) continue;
        const int feature = tile * TILE_ROWS + place.feature, row = expert * tiles * TILE_ROWS + feature;
        float total = total_of<COLUMN_TILES>(partial, warps_down, parts * place.down, place.index);
        if (bias) total += bf16_as_float(bias[row]);
        if (gated) {
            float up = total_of<COLUMN_TILES>(partial, warps_down, 2 * place.down + 1, place.index);
            if (bias) up += bf16_as_float(bias[weight.row_tiles / 2 * TILE_ROWS + row]);
            total = activated(total, up, activation);
        }
        out[static_cast<u64>(order[place.row]) * out_stride + feature] = float_as_bf16(total);
    }
}

#define EXPERT_MM(COLUMN_TILES, PARTLY)                                                                            \
    KERNEL(expert_mm_##COLUMN_TILES)(                                                                              \
        Weight weight, Runs runs, int experts, const u16 *x, int x_stride, int each, u16 *out, int out_stride,     \
        const u16 *bias, int activation, int blocks, int chunk, int warps_down) {                                  \
        SHARED_MEMORY(shared);                                                                                     \
        expert_mm<COLUMN_TILES, PARTLY>(                                                                           \
            weight, runs, experts, x, x_stride, each, out, out_stride, bias, activation, blocks, chunk, warps_down, \
            shared);                                                                                               \
    }

EXPERT_MM(1, false)
EXPERT_MM(2, true)
EXPERT_MM(8, true)
