// Runs Metal kernels on a CPU: the names of the Metal language that the kernels use, for g++.
//
// Follows cuda_on_host.hpp, whose fibers are the threads of a threadgroup; 32 of them are a simdgroup.
#include <cmath>
#include <cstdint>

#define constant
#define device
#define thread
#define threadgroup

typedef unsigned int uint;
typedef unsigned short ushort;
typedef uint8_t uint8;

struct uint3 {
    uint x, y, z;
};

struct half {  // IEEE 754, 16 bits
    uint16_t bits;
    half() = default;
    explicit half(float value) : bits(float_as_half(value)) {}
    operator float() const { return widen_half(bits); }
};

struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    explicit bfloat16_t(float value) : bits(static_cast<uint16_t>(host::to_bf16(value))) {}
    operator float() const { return host::bf16(bits); }
};

template <typename To, typename From>
To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

namespace metal {
enum class mem_flags { mem_none, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { synchronise(); }
inline float exp(float value) { return std::exp(value); }
inline float tanh(float value) { return std::tanh(value); }
inline float max(float a, float b) { return std::fmax(a, b); }  // of a number and none, the number
inline uint max(uint a, uint b) { return a > b ? a : b; }
inline float log(float value) { return std::log(value); }
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline uint min(uint a, uint b) { return a < b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float simd_sum(float value) {
    for (int apart = 16; apart; apart /= 2) value += other_lane(value, apart);
    return value;
}
inline float simd_max(float value) {
    for (int apart = 16; apart; apart /= 2) value = max(value, other_lane(value, apart));
    return value;
}
inline uint simd_sum(uint value) {
    for (int apart = 16; apart; apart /= 2) value += as_type<uint>(other_lane(as_type<float>(value), apart));
    return value;
}
inline uint simd_max(uint value) {
    for (int apart = 16; apart; apart /= 2) value = max(value, as_type<uint>(other_lane(as_type<float>(value), apart)));
    return value;
}
inline uint simd_prefix_exclusive_sum(uint value) {
    const uint lane = host::thread_index.x % 32, own = value;
    for (uint apart = 1; apart < 32; apart *= 2) {
        const uint earlier = as_type<uint>(of_lane(as_type<float>(value), lane >= apart ? lane - apart : lane));
        if (lane >= apart) value += earlier;
    }
    return value - own;
}
template <typename T>
T simd_shuffle_xor(T value, ushort apart) {
    return as_type<T>(other_lane(as_type<float>(value), apart));
}
template <typename T>
T simd_shuffle(T value, ushort lane) {
    return as_type<T>(of_lane(as_type<float>(value), lane));
}
}  // namespace metal

namespace host {
inline uint3 groups_of(uint3 grid, uint3 size) {
    return {(grid.x + size.x - 1) / size.x, (grid.y + size.y - 1) / size.y, (grid.z + size.z - 1) / size.z};
}

// Place of the current thread in a grid of ``groups`` threadgroups of ``size`` threads, x fastest.
inline uint3 place_in_grid(uint3 groups, uint3 size) {
    const uint block = block_index.x, inner = thread_index.x;
    return {block % groups.x * size.x + inner % size.x,
            block / groups.x % groups.y * size.y + inner / size.x % size.y,
            block / groups.x / groups.y * size.z + inner / size.x / size.y};
}
}  // namespace host
