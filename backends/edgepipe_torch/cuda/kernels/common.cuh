// What all products share: a weight's tensors, inputs in shared memory, conversions.

#define TILE_ROWS 16
#define TILE_INPUTS 128
#define WARPS 8
#define MOST_COLUMN_TILES 8  // tiles of 8 rows of the largest product
#define FIXED_CHUNK 256      // inputs that the largest product stages at a time

struct Weight {
    const u32 *low;          // [row tiles, input tiles, 16, 4, 4]; wide.cu: [out features, in features] bf16
    const u32 *high;         // [row tiles, input tiles, 16, 4, HIGH]
    const void *scale;       // [row tiles, group tiles, 16, GROUPS_PER_TILE]
    const void *scale_base;  // [row tiles, spans, 16]
    const void *offset;      // as scale
    const void *offset_base;
    const u8 *zeros;  // as scale
    int zero;
    int out_features;
    int in_features;
    int row_tiles;
    int input_tiles;
    int group_tiles;
    int spans;
};

DEVICE float bf16_as_float(u16 bits) { return bits_as_float(static_cast<u32>(bits) << 16); }

// Round to nearest, ties to even.
DEVICE u16 float_as_bf16(float value) {
    const u32 bits = float_as_bits(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;  // no number
    return static_cast<u16>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// The inputs [rows, inputs] bf16 that a block holds in shared memory, and their sums by segment [segments, columns].
struct Staged {
    const unsigned char *inputs;
    int pitch;  // bytes of a row, 32 more than a multiple of 128: eight-byte reads of a warp meet no bank twice
    const float *sums;
    int rows;
};

// Which row of shared memory a column reads. Columns beyond the rows are not stored, so they may read any; the largest
// product has room for all columns.
template <int COLUMN_TILES>
DEVICE int staged_row(int column, const Staged &staged) {
    return COLUMN_TILES == MOST_COLUMN_TILES ? column : min(column, staged.rows - 1);
}
