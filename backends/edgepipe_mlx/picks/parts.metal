// Body of the kernel of parts, which takes the COUNT most likely of each THREADS * OWN tokens, in any order:
//     logits, changed  [R, V]: as computed, and edited (the same array, if no logit is edited)
//     masks            [R, W]: a bit for each allowed token, if MASKED
//     temperatures     [R], or more
//     left             [R, parts, 2 * COUNT + ENDS]: keys, ids, and the bits of the highest changed logit, of the sum of
//                      exponentials of the distances to it over the temperature, and of the same two of the logits as
//                      computed, at temperature 1
// Wrong counts write nothing beside the array, so that the check at load survives them.
// CHANGED: logits are edited or masked. A thread's position: thread of a threadgroup, part, row.
threadgroup uint places[2 * (THREADS / 32)];
const int thread_index = int(thread_position_in_grid.x), part = int(thread_position_in_grid.y);
const int row = int(thread_position_in_grid.z), tokens = logits_shape[1];
const int parts = (tokens + THREADS * OWN - 1) / (THREADS * OWN);
const size_t first = size_t(row) * tokens;
device uint *to = left + (size_t(row) * parts + part) * (2 * COUNT + ENDS);
const PartIds<THREADS> own_ids = {part * THREADS * OWN + thread_index};
Sums<THREADS> sums = {places, thread_index, 0};
uint own[OWN], best = NO_TOKEN;
#pragma unroll
for (int index = 0; index < OWN; index++) {
    const int id = own_ids.at(index);
    own[index] = NO_TOKEN;
    if (id < tokens) {
        own[index] = key_of(changed[first + id]);
        if (MASKED && !(masks[size_t(row) * masks_shape[1] + id / 32] >> id % 32 & 1)) own[index] = FORBIDDEN;
    }
    best = metal::max(best, own[index]);
}
best = sums.highest(best);
float total = sums.total(exponentials<OWN>(own, best, temperatures[row]));
if (thread_index == 0) to[2 * COUNT] = as_type<uint>(value_of(best)), to[2 * COUNT + 1] = as_type<uint>(total);
const Cut cut = cut_of<COUNT, OWN, THREADS>(own, own_ids, sums);
uint taken = 0;
#pragma unroll
for (int index = 0; index < OWN; index++) taken += cut.takes(own[index], own_ids.at(index));
uint place = sums.before(taken);
#pragma unroll
for (int index = 0; index < OWN; index++)
    if (cut.takes(own[index], own_ids.at(index)) && place < COUNT)
        to[place] = own[index], to[COUNT + place] = uint(own_ids.at(index)), place++;
if (CHANGED) {
    best = NO_TOKEN;
    #pragma unroll
    for (int index = 0; index < OWN; index++) {
        own[index] = own_ids.at(index) < tokens ? key_of(logits[first + own_ids.at(index)]) : NO_TOKEN;
        best = metal::max(best, own[index]);
    }
    best = sums.highest(best);
}
total = sums.total(exponentials<OWN>(own, best, 1.0f));
if (thread_index == 0) to[2 * COUNT + 2] = as_type<uint>(value_of(best)), to[2 * COUNT + 3] = as_type<uint>(total);
