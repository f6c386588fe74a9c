// Body of the kernel of shares:
//     x               [T, HEADS, 1, DIM], with any strides
//     keys, values    [key heads, slots, n], with their scales (the same arrays, if they have none)
//     rows, tables    [S, COLUMNS] and [S, N]
//     numbers         [8]: factor and cap of logits
//     y               [rows, HEADS, shares, WIDTH + 2]: sums of values, the highest logit, and the sum of exponentials
// A thread's position: lane, simdgroup of a share, tile of queries of a key head of a sequence.
threadgroup float asked[QUERIES * DIM];
threadgroup float found[QUERIES * WIDTH];
threadgroup float ends[SIMDGROUPS * QUERIES * 2];
const int lane = int(thread_position_in_grid.x);
const int simdgroup = int(thread_position_in_grid.y) % SIMDGROUPS, share = int(thread_position_in_grid.y) / SIMDGROUPS;
const int key_heads = keys_shape[0], slots = keys_shape[1], group = HEADS / key_heads;
// These columns are the same for all sequences.
const int tiles = rows[TILES], shares = rows[SHARES];
const int tile = int(thread_position_in_grid.z) % tiles, head = int(thread_position_in_grid.z) / tiles % key_heads;
const int sequence = int(thread_position_in_grid.z) / tiles / key_heads;
const device int *own = rows + sequence * COLUMNS;
const device int *table = tables + size_t(sequence) * tables_shape[1];
const int queries = metal::min(own[COUNT] * group - tile * QUERIES, QUERIES);
if (queries <= 0) return;
const int thread_index = simdgroup * LANES + lane, threads = SIMDGROUPS * LANES;
const int begin = own[FIRST_KEY] + share * own[SHARE], end = metal::min(begin + own[SHARE], own[LENGTH]);
if (begin >= end) {  // shares of a longer sequence
    for (int query = thread_index; query < queries; query += threads) {
        const int place = tile * QUERIES + query;
        const size_t row = size_t(own[OUT_ROW] + place / group) * HEADS + head * group + place % group;
        device float *to = y + (row * shares + share) * (WIDTH + 2);
        to[WIDTH] = LOWEST, to[WIDTH + 1] = 0.0f;
    }
    return;
}
for (int index = thread_index; index < QUERIES * DIM; index += threads) {
    const int query = index / DIM, place = tile * QUERIES + query;
    float value = 0.0f;
    if (query < queries) {
        const size_t row = size_t(own[FIRST_ROW] + place / group), asking = size_t(head * group + place % group);
        value = float(x[row * x_strides[0] + asking * x_strides[1] + index % DIM * x_strides[3]]) * numbers[0];
    }
    asked[index] = value;
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
Batches<DIM, WIDTH, QUERIES> batches;
batches.clear();
const size_t first_slot = size_t(head) * slots;
const Vectors<DIM, SCALES, K, S> all_keys = {keys + first_slot * STORED, key_scales + first_slot * SCALES};
const Vectors<DIM, SCALES, K, S> all_values = {values + first_slot * STORED, value_scales + first_slot * SCALES};
const Rests<DIM, SCALES, BLOCK, REST, K, S> key_rests = {all_keys.all, all_keys.scales, table};
const Rests<DIM, SCALES, BLOCK, REST, K, S> value_rests = {all_values.all, all_values.scales, table};
for (int batch = begin + simdgroup * BATCH; batch < end; batch += SIMDGROUPS * BATCH) {
    const int key = metal::min(batch + lane, end - 1);  // a lane without a key reads the last one, which weighs nothing
    const int slot = table[key / BLOCK] * BLOCK + key % BLOCK;
    // A query reads the tokens of its own span with 8 bits.
    const bool newest = SPAN > 0 && batch + BATCH > (own[LENGTH] - own[COUNT]) / (SPAN + !SPAN) * SPAN;
    float logits[QUERIES], rests[QUERIES];
    bool seen[QUERIES];
    batches.multiply(asked, all_keys, slot, lane, logits);
    if (newest) batches.multiply(asked, key_rests, key, lane, rests);
    #pragma unroll
    for (int query = 0; query < QUERIES; query++) {
        const int position = own[LENGTH] - own[COUNT] + (tile * QUERIES + query) / group;
        seen[query] = batch + lane < end && key <= position && (WINDOW == 0 || key > position - WINDOW);
        if (newest && key >= position / (SPAN + !SPAN) * SPAN) logits[query] += rests[query];
        if (CAPPED) logits[query] = numbers[1] * metal::tanh(logits[query] / numbers[1]);
    }
    batches.weigh(logits, seen);
    const int count = metal::min(end - batch, BATCH);
    batches.add(logits, all_values, slot, count, lane);
    if (newest) {
        #pragma unroll
        for (int query = 0; query < QUERIES; query++) {
            const int position = own[LENGTH] - own[COUNT] + (tile * QUERIES + query) / group;
            rests[query] = key >= position / (SPAN + !SPAN) * SPAN ? logits[query] : 0.0f;
        }
        batches.add(rests, value_rests, key, count, lane);
    }
}
batches.gather();
if (lane == 0) {
    #pragma unroll
    for (int query = 0; query < QUERIES; query++) {
        ends[(simdgroup * QUERIES + query) * 2] = batches.highest[query];
        ends[(simdgroup * QUERIES + query) * 2 + 1] = batches.totals[query];
    }
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
float highest[QUERIES], totals[QUERIES], factors[QUERIES];
#pragma unroll
for (int query = 0; query < QUERIES; query++) {
    highest[query] = LOWEST, totals[query] = 0.0f;
    for (int each = 0; each < SIMDGROUPS; each++)
        highest[query] = metal::max(highest[query], ends[(each * QUERIES + query) * 2]);
    for (int each = 0; each < SIMDGROUPS; each++) {
        const threadgroup float *end_of = ends + (each * QUERIES + query) * 2;
        totals[query] = metal::fma(end_of[1], metal::exp(end_of[0] - highest[query]), totals[query]);
    }
    factors[query] = metal::exp(batches.highest[query] - highest[query]);
}
for (int turn = 0; turn < SIMDGROUPS; turn++) {
    if (simdgroup == turn) batches.leave(found, factors, turn > 0, lane);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}
#pragma unroll
for (int query = 0; query < QUERIES; query++) {
    const int place = tile * QUERIES + query;
    if (query < queries) {
        const size_t row = size_t(own[OUT_ROW] + place / group) * HEADS + head * group + place % group;
        device float *to = y + (row * shares + share) * (WIDTH + 2);
        for (int index = thread_index; index < WIDTH; index += threads) to[index] = found[query * WIDTH + index];
        if (thread_index == 0) to[WIDTH] = highest[query], to[WIDTH + 1] = totals[query];
    }
}
