// What surrounds products with experts: each row's choice, pairs of a row and an expert sorted by expert, and the sum of
// a row's results.

#define THREADS 256

// The better of two candidates, of which one may be absent (-1): the higher value, then the lower number.
DEVICE bool better(float value, int number, float other, int other_number) {
    if (number < 0 || other_number < 0) return other_number < 0;
    return value > other || (!(value < other) && number < other_number);
}

// Choose ``used`` experts of a row by its logits [rows, experts], and their weights. One block for each row.
KERNEL(choose)(
    const float *logits, const float *correction, int experts, int used, int sigmoid, int normalised,
    long long *chosen, float *weights) {
    SHARED_MEMORY(shared);
    float *scores = reinterpret_cast<float *>(shared);  // [experts]
    float *values = scores + experts;                   // [THREADS]
    int *numbers = reinterpret_cast<int *>(values + THREADS);
    u8 *taken = reinterpret_cast<u8 *>(numbers + THREADS);  // [experts]
    const int thread = threadIdx.x;
    const float *own = logits + static_cast<u64>(blockIdx.x) * experts;
    float highest = own[0];
    for (int expert = thread; expert < experts; expert += THREADS) {
        highest = own[expert] > highest ? own[expert] : highest;
        taken[expert] = 0;
    }
    values[thread] = highest;
    synchronise();
    for (int reach = THREADS / 2; reach; reach /= 2) {
        if (thread < reach && values[thread + reach] > values[thread]) values[thread] = values[thread + reach];
        synchronise();
    }
    highest = values[0];
    synchronise();
    float total = 0.0f;
    for (int expert = thread; expert < experts; expert += THREADS) {
        scores[expert] = sigmoid ? 1.0f / (1.0f + expf(-own[expert])) : expf(own[expert] - highest);
        total += scores[expert];
    }
    values[thread] = total;
    synchronise();
    for (int reach = THREADS / 2; reach; reach /= 2) {
        if (thread < reach) values[thread] += values[thread + reach];
        synchronise();
    }
    total = sigmoid ? 1.0f : values[0];
    synchronise();
    float sum = 0.0f;
    for (int k = 0; k < used; k++) {
        float best = 0.0f;
        int number = -1;
        for (int expert = thread; expert < experts; expert += THREADS) {
            const float rank = scores[expert] / total + (correction ? correction[expert] : 0.0f);
            if (!taken[expert] && better(rank, expert, best, number)) best = rank, number = expert;
        }
        values[thread] = best;
        numbers[thread] = number;
        synchronise();
        for (int reach = THREADS / 2; reach; reach /= 2) {
            if (thread < reach &&
                better(values[thread + reach], numbers[thread + reach], values[thread], numbers[thread])) {
                values[thread] = values[thread + reach];
                numbers[thread] = numbers[thread + reach];
            }
            synchronise();
        }
        number = numbers[0];
        const u64 place = static_cast<u64>(blockIdx.x) * used + k;
        const float weight = scores[number] / total;
        sum += weight;
        synchronise();
        if (thread == 0) {
            taken[number] = 1;
            chosen[place] = number;
            weights[place] = weight;
        }
        synchronise();
    }
    if (normalised && thread == 0)
        for (int k = 0; k < used; k++) weights[static_cast<u64>(blockIdx.x) * used + k] /= sum;
}

// Sort pairs by expert and cut each expert's to runs of up to ``most``. One block.
//
// chosen [pairs]; order [pairs]; runs [.., 3]: expert, first place in ``order``, count; found [2]: runs, and experts with
// pairs. Pairs of one expert come in any order, which changes no result: see products.cu. Pairs of expert -1 are left out.
KERNEL(sort_pairs)(const long long *chosen, int pairs, int experts, int most, int *order, int *runs, int *found) {
    SHARED_MEMORY(shared);
    int *own = reinterpret_cast<int *>(shared);  // pairs of each expert, then the next free place of each
    int2 *ends = reinterpret_cast<int2 *>(own + (experts + 1) / 2 * 2);  // pairs and runs of experts up to each
    int2 *next = ends + experts;
    int *distinct = reinterpret_cast<int *>(next + experts);
    if (threadIdx.x == 0) *distinct = 0;
    for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) own[expert] = 0;
    synchronise();
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x)
        if (chosen[pair] >= 0) add_shared(own + chosen[pair], 1);
    synchronise();
    for (int expert = threadIdx.x; expert < experts; expert += blockDim.x)
        ends[expert] = make_int2(own[expert], (own[expert] + most - 1) / most);
    synchronise();
    for (int reach = 1; reach < experts; reach *= 2) {
        for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
            int2 total = ends[expert];
            if (expert >= reach) {
                total.x += ends[expert - reach].x;
                total.y += ends[expert - reach].y;
            }
            next[expert] = total;
        }
        synchronise();
        int2 *last = ends;
        ends = next;
        next = last;
    }
    for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        const int size = own[expert], first = ends[expert].x - size, end = ends[expert].y;
        if (size) add_shared(distinct, 1);
        const int begin = end - (size + most - 1) / most;
        for (int run = begin; run < end; run++) {
            const int before = (run - begin) * most;
            runs[3 * run] = expert;
            runs[3 * run + 1] = first + before;
            runs[3 * run + 2] = min(most, size - before);
        }
        own[expert] = first;
    }
    if (threadIdx.x == 0) found[0] = ends[experts - 1].y;
    synchronise();
    if (threadIdx.x == 0) found[1] = *distinct;
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x)
        if (chosen[pair] >= 0) order[add_shared(own + chosen[pair], 1)] = pair;
}

// Add sum over k of weights[row, k] * results[row, k] to total [rows, stride], in bf16, rounded once; features are even.
// Results of weight 0 may be missing.
KERNEL(add_weighted)(
    const u32 *results, const float *weights, int used, int features, int rows, u16 *total, int stride) {
    const int halves = features / 2;
    const u64 all = static_cast<u64>(rows) * halves, step = static_cast<u64>(gridDim.x) * blockDim.x;
    for (u64 index = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; index < all; index += step) {
        const u64 row = index / halves, half = index % halves;
        u32 *to = reinterpret_cast<u32 *>(total + row * stride) + half;
        float low = bits_as_float(*to << 16), high = bits_as_float(*to & 0xFFFF0000u);
        for (int k = 0; k < used; k++) {
            const u32 found = results[(row * used + k) * halves + half];
            const float weight = weights[row * used + k];
            if (weight == 0.0f) continue;
            low += weight * bits_as_float(found << 16);
            high += weight * bits_as_float(found & 0xFFFF0000u);
        }
        *to = float_as_bf16(low) | static_cast<u32>(float_as_bf16(high)) << 16;
    }
}

// Add sigmoid(x[row] . gate) * added[row] to total [rows, features], in bf16, rounded once. One block for each row.
KERNEL(add_gated)(
    const u16 *x, int x_stride, const u16 *gate, int inputs, const u16 *added, int added_stride, int features,
    u16 *total, int stride) {
    SHARED_MEMORY(shared);
    float *sums = reinterpret_cast<float *>(shared);  // [THREADS]
    const u64 row = blockIdx.x;
    float sum = 0.0f;
    for (int input = threadIdx.x; input < inputs; input += THREADS)
        sum += bf16_as_float(x[row * x_stride + input]) * bf16_as_float(gate[input]);
    sums[threadIdx.x] = sum;
    synchronise();
    for (int reach = THREADS / 2; reach; reach /= 2) {
        if (threadIdx.x < reach) sums[threadIdx.x] += sums[threadIdx.x + reach];
        synchronise();
    }
    const float factor = 1.0f / (1.0f + expf(-sums[0]));
    for (int feature = threadIdx.x; feature < features; feature += THREADS) {
        u16 *to = total + row * stride + feature;
        *to = float_as_bf16(bf16_as_float(*to) + factor * bf16_as_float(added[row * added_stride + feature]));
    }
}
