// Runs CUDA kernels on a CPU, one block after the other: replaces primitives.cuh for g++.
//
// Each CUDA thread is a fiber. A warp's fibers run in turn up to the next warp-wide operation, and a block's warps up to
// the next barrier, from the first warp in even blocks and from the last in odd ones. So a missing or divergent barrier
// shows. Tensor-core products follow the layout of PTX ISA.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

using std::min;

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(8) int2 {
    int32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline int2 make_int2(int32_t x, int32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct Index {
    unsigned x;
};

namespace host {

constexpr size_t STACK = 64 * 1024;
enum class State { ready, at_warp, at_block, done };

struct Fiber {
    ucontext_t context;  // where it begins
    jmp_buf place;       // where it goes on: jumping there takes no system call
    bool begun;
    std::vector<char> stack;
    State state;
    unsigned operations;  // warp-wide ones so far
};

struct Operand {
    uint32_t a[4], b[2];
};

inline std::vector<Fiber> fibers;
inline jmp_buf scheduler;
inline unsigned current;
inline std::vector<Operand> operands[2];  // by thread; two, since a lane may be one operation ahead
inline std::vector<unsigned char> shared;
inline std::function<void()> body;
inline Index thread_index, block_index, block_size, grid_size;

inline void wait(State state) {
    Fiber &fiber = fibers[current];
    fiber.state = state;
    if (!_setjmp(fiber.place)) _longjmp(scheduler, 1);
}

inline void enter() {
    body();
    wait(State::done);
}

inline void resume(unsigned thread) {
    current = thread;
    thread_index.x = thread;
    Fiber &fiber = fibers[thread];
    fiber.state = State::ready;
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

// Run a warp until all its lanes are at a barrier or done.
inline void run_warp(unsigned first) {
    if (fibers[first].state == State::done) return;
    for (bool more = true; more;) {
        for (unsigned lane = 0; lane < 32; lane++) resume(first + lane);
        const State state = fibers[first].state;
        for (unsigned lane = 0; lane < 32; lane++)
            if (fibers[first + lane].state != state) throw std::runtime_error("lanes of a warp diverge");
        more = state == State::at_warp;
    }
}

inline void run_block(unsigned threads) {
    for (unsigned thread = 0; thread < threads; thread++) {
        Fiber &fiber = fibers[thread];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
        fiber.state = State::ready;
        fiber.begun = false;
        fiber.operations = 0;
    }
    for (bool more = true; more;) {
        for (unsigned warp = 0; warp < threads / 32; warp++)
            run_warp(block_index.x % 2 ? threads - 32 * (warp + 1) : 32 * warp);
        const State state = fibers[0].state;
        for (unsigned thread = 0; thread < threads; thread++)
            if (fibers[thread].state != state) throw std::runtime_error("threads of a block diverge at a barrier");
        more = state == State::at_block;
    }
}

// Run a kernel. Shared memory begins as NaN. Returns 0, or 1 if threads diverge.
inline int launch(unsigned blocks, unsigned threads, unsigned shared_bytes, std::function<void()> kernel) {
    fibers.resize(threads);
    for (Fiber &fiber : fibers) fiber.stack.resize(STACK);
    for (auto &each : operands) each.resize(threads);
    body = std::move(kernel);
    block_size.x = threads;
    grid_size.x = blocks;
    try {
        for (unsigned block = 0; block < blocks; block++) {
            block_index.x = block;
            shared.assign(shared_bytes, 0xFF);  // floats that are no numbers
            run_block(threads);
        }
    } catch (const std::runtime_error &) {
        return 1;
    }
    return 0;
}

inline float bf16(uint32_t bits) {
    bits <<= 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t to_bf16(double exact) {
    const float value = static_cast<float>(exact);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

}  // namespace host

#define threadIdx host::thread_index
#define blockIdx host::block_index
#define blockDim host::block_size
#define gridDim host::grid_size
#define __device__
#define KERNEL(name) inline void name
#define KERNEL_OF_FOUR(name) inline void name
#define KERNEL_OF_TWO(name) inline void name
#define DEVICE inline
#define SHARED_MEMORY(name) unsigned char *name = host::shared.data()

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

DEVICE void synchronise() { host::wait(host::State::at_block); }

DEVICE int add_shared(int *place, int value) {
    *place += value;
    return *place - value;
}

DEVICE float of_lane(float value, unsigned lane) {
    host::Fiber &fiber = host::fibers[host::current];
    std::vector<host::Operand> &given = host::operands[fiber.operations++ % 2];
    std::memcpy(given[host::current].a, &value, 4);
    host::wait(host::State::at_warp);
    std::memcpy(&value, given[(host::current & ~31u) + lane].a, 4);
    return value;
}

DEVICE float other_lane(float value, int apart) { return of_lane(value, (host::current & 31u) ^ apart); }

DEVICE float bits_as_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

DEVICE u32 float_as_bits(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

DEVICE float widen_half(u16 bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value = exponent == 0    ? std::ldexp(static_cast<float>(mantissa), -24)
                  : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                   : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
    return bits & 0x8000 ? -value : value;
}

DEVICE u16 float_as_half(float value) {
    if (value != value) return 0x7E00;
    const u32 sign = std::signbit(value) ? 0x8000 : 0;
    int exponent;
    std::frexp(value, &exponent);
    const double step = std::ldexp(1.0, std::max(exponent - 11, -24));
    const double rounded = std::nearbyint(std::fabs(value) / step) * step;
    if (rounded >= 65536.0) return sign | 0x7C00;
    if (rounded < std::ldexp(1.0, -14)) return sign | static_cast<u32>(std::ldexp(rounded, 24));
    std::frexp(rounded, &exponent);
    return sign | (exponent + 14) << 10 | (static_cast<u32>(std::ldexp(rounded, 11 - exponent)) - 1024);
}

DEVICE u32 two_bytes(u32 first, int of_first, u32 second, int of_second) {
    return (first >> 8 * of_first & 0xFF) | (second >> 8 * of_second & 0xFF) << 16 | 0xA500A500;  // anything
}

DEVICE u32 rounded_pair(float lower, float upper) { return host::to_bf16(lower) | host::to_bf16(upper) << 16; }

DEVICE u32 masked_or(u32 value, u32 mask, u32 set) { return (value & mask) | set; }

DEVICE u32 fma_bf16_pair(u32 a, u32 b, u32 c) {
    u32 result = 0;
    for (int half = 0; half < 32; half += 16) {
        const double product = static_cast<double>(host::bf16(a >> half & 0xFFFF)) * host::bf16(b >> half & 0xFFFF);
        result |= host::to_bf16(product + host::bf16(c >> half & 0xFFFF)) << half;
    }
    return result;
}

DEVICE void multiply_tiles(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    host::Fiber &fiber = host::fibers[host::current];
    std::vector<host::Operand> &given = host::operands[fiber.operations++ % 2];
    given[host::current] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    host::wait(host::State::at_warp);
    const unsigned first = host::current & ~31u, lane = host::current & 31u;
    for (int part = 0; part < 4; part++) {
        const unsigned row = lane / 4 + 8 * (part / 2), column = 2 * (lane % 4) + part % 2;
        for (unsigned k = 0; k < 16; k++) {
            const host::Operand &left = given[first + 4 * (row % 8) + k % 8 / 2];
            const host::Operand &right = given[first + 4 * column + k % 8 / 2];
            const u32 x = left.a[row / 8 + 2 * (k / 8)] >> (16 * (k % 2)) & 0xFFFF;
            const u32 y = right.b[k / 8] >> (16 * (k % 2)) & 0xFFFF;
            sum[part] += host::bf16(x) * host::bf16(y);
        }
    }
}
