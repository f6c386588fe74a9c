// Weights of bf16 [out features, in features], read in the tiles that packed ones have.

#define TABLE_BYTES 0

DEVICE void fill_table(u32 *) {}

// One lane's part of a tile: 16 bytes of each 32 inputs of rows g and g + 8.
struct TilePart {
    uint4 values[2][4];

    DEVICE void load(const Weight &weight, int row_tile, int input_tile, int lane) {
        const u16 *all = reinterpret_cast<const u16 *>(weight.low);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_tile * TILE_ROWS + (lane >> 2) + 8 * half;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const int input = input_tile * TILE_INPUTS + 32 * w + 8 * (lane & 3);
                values[half][w] = make_uint4(0, 0, 0, 0);
                if (row < weight.out_features && input < weight.in_features)
                    values[half][w] =
                        *reinterpret_cast<const uint4 *>(all + static_cast<u64>(row) * weight.in_features + input);
            }
        }
    }
};

// Add the product of a tile with the staged inputs from ``first`` on to sums [16, 8 * COLUMN_TILES].
template <int COLUMN_TILES, bool PARTLY>
DEVICE void multiply_part(
    float (&sums)[COLUMN_TILES][4], const Weight &, const TilePart &part, const Staged &staged, int first, const u32 *,
    int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const uint4 upper = part.values[0][w], lower = part.values[1][w];
        const u32 a[2][4] = {{upper.x, lower.x, upper.y, lower.y}, {upper.z, lower.z, upper.w, lower.w}};
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++) {
            if (PARTLY && 8 * tile >= staged.rows) break;
            const int row = staged_row<COLUMN_TILES>(8 * tile + g, staged);
            const uint4 b = *reinterpret_cast<const uint4 *>(
                staged.inputs + row * staged.pitch + 2 * (first + 32 * w + 8 * t));
            multiply_tiles(sums[tile], a[0], b.x, b.y);
            multiply_tiles(sums[tile], a[1], b.z, b.w);
        }
    }
}
