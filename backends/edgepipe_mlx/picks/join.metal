// Body of the kernel that joins the parts of a row:
//     left          [R, parts, 2 * COUNT + ENDS], as the kernel of parts leaves it
//     logits        [R, V], as computed
//     temperatures  [R], or more
//     picked        [R, 3 * COUNT + 2]: ids, changed logits and logits as computed, by descending changed logits; the
//                   sum of exponentials at the temperature; the log of the sum of exponentials as computed
// Wrong counts write and read nothing beside the arrays, so that the check at load survives them.
// A thread's position: thread of a threadgroup, row.
threadgroup uint places[2 * (THREADS / 32)];
threadgroup uint taken_keys[COUNT];
threadgroup int taken_ids[COUNT];
const int thread_index = int(thread_position_in_grid.x), row = int(thread_position_in_grid.y);
const int parts = left_shape[1];
const device uint *of_row = left + size_t(row) * parts * (2 * COUNT + ENDS);
const LeftTokens<COUNT, THREADS> tokens = {of_row, thread_index, parts};
Sums<THREADS> sums = {places, thread_index, 0};
uint own[OWN], best = NO_TOKEN, best_computed = NO_TOKEN;
#pragma unroll
for (int index = 0; index < OWN; index++) {
    own[index] = tokens.key(index);
    best = metal::max(best, own[index]);
}
best = sums.highest(best);
for (int part = thread_index; part < parts; part += THREADS)
    best_computed = metal::max(best_computed, key_of(as_type<float>(of_row[part * (2 * COUNT + ENDS) + 2 * COUNT + 2])));
best_computed = sums.highest(best_computed);
float total = 0.0f, total_computed = 0.0f;
for (int part = thread_index; part < parts; part += THREADS) {
    const device uint *end = of_row + part * (2 * COUNT + ENDS) + 2 * COUNT;
    total += as_type<float>(end[1]) * metal::exp((as_type<float>(end[0]) - value_of(best)) / temperatures[row]);
    total_computed += as_type<float>(end[3]) * metal::exp(as_type<float>(end[2]) - value_of(best_computed));
}
total = sums.total(total), total_computed = sums.total(total_computed);
device uint *to = picked + size_t(row) * (3 * COUNT + 2);
if (thread_index == 0) {
    to[3 * COUNT] = as_type<uint>(total);
    to[3 * COUNT + 1] = as_type<uint>(value_of(best_computed) + metal::log(total_computed));
}
const Cut cut = cut_of<COUNT, OWN, THREADS>(own, tokens, sums);
uint taken = 0;
#pragma unroll
for (int index = 0; index < OWN; index++) taken += cut.takes(own[index], tokens.at(index));
uint place = sums.before(taken);
#pragma unroll
for (int index = 0; index < OWN; index++)
    if (cut.takes(own[index], tokens.at(index)) && place < COUNT)
        taken_keys[place] = own[index], taken_ids[place] = tokens.at(index), place++;
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
for (int each = thread_index; each < COUNT; each += THREADS) {
    const Cut above = {taken_keys[each], taken_ids[each]};
    int rank = 0;
    for (int other = 0; other < COUNT; other++) rank += above.takes(taken_keys[other], taken_ids[other]);
    to[rank] = uint(above.id);
    to[COUNT + rank] = as_type<uint>(value_of(above.key));
    const uint id = metal::min(uint(above.id), uint(logits_shape[1] - 1));
    to[2 * COUNT + rank] = as_type<uint>(logits[size_t(row) * logits_shape[1] + id]);
}
