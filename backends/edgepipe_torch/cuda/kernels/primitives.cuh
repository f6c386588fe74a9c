// What the kernels need from the device, for sm_80 and newer. The tests replace this file by one for the host.
// NVRTC finds no CUDA headers on a user's machine, so conversions and tensor-core products are written in PTX.

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256) name
// A kernel of which four blocks share a multiprocessor's registers.
#define KERNEL_OF_FOUR(name) extern "C" __global__ void __launch_bounds__(256, 4) name
// A kernel of which two blocks do.
#define KERNEL_OF_TWO(name) extern "C" __global__ void __launch_bounds__(256, 2) name
#define DEVICE __device__ __forceinline__
#define SHARED_MEMORY(name)              \
    extern __shared__ uint4 name##_16[]; \
    unsigned char *name = reinterpret_cast<unsigned char *>(name##_16)

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

DEVICE void synchronise() { __syncthreads(); }

// Add to a number in shared memory, also of other threads; return it as it was.
DEVICE int add_shared(int *place, int value) { return atomicAdd(place, value); }

// The value of the lane whose number differs by ``apart`` in its bits. All lanes of a warp take part.
DEVICE float other_lane(float value, int apart) { return __shfl_xor_sync(0xFFFFFFFFu, value, apart); }

DEVICE float bits_as_float(u32 bits) { return __uint_as_float(bits); }

DEVICE u32 float_as_bits(float value) { return __float_as_uint(value); }

DEVICE float widen_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Round to float16, to nearest, ties to even.
DEVICE u16 float_as_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Round two floats to bf16, to nearest, ties to even: the first one in the lower half.
DEVICE u32 rounded_pair(float lower, float upper) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
    return pair;
}

// A byte of each word in the lower bytes of a word's halves; the upper bytes may hold anything.
DEVICE u32 two_bytes(u32 first, int of_first, u32 second, int of_second) {
    return __byte_perm(first, second, of_first | (4 + of_second) << 8);
}

// (value & mask) | set, in one instruction: with two constants the compiler would take two.
DEVICE u32 masked_or(u32 value, u32 mask, u32 set) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(value), "r"(mask), "r"(set));
    return result;
}

// a * b + c for two bf16 at once, rounded once.
DEVICE u32 fma_bf16_pair(u32 a, u32 b, u32 c) {
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// sum += a b, with a [16, 16] and b [16, 8] in bf16 and sum [16, 8] in float32, spread over a warp as in PTX ISA,
// "Matrix fragments for mma.m16n8k16 with floating point type". With g = lane / 4 and t = lane % 4, a lane holds
//   a[0..3]   rows g, g + 8, g, g + 8 at columns 2t, 2t, 2t + 8, 2t + 8, each with its right neighbour
//   b0, b1    column g at rows 2t and 2t + 8, each with the row below
//   sum[0..3] row g at columns 2t, 2t + 1, then row g + 8
DEVICE void multiply_tiles(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
