// Block-wise quantisation of float32: 256 elements share a float32 scale, the greatest magnitude over the largest code.
//
// A warp does one block, a lane eight elements. Code = x / scale rounded to nearest, ties to even (fp8: to the nearest
// e4m3); value = code * scale. A block that holds a NaN or an infinity gets the scale NaN and the codes 0: all of it
// becomes NaN, so that a broken moment is never taken for a number. unorm: what is below 0 becomes 0; what is above 0
// never becomes 0, for a second moment stands in a denominator. A scale that underflows to 0 makes the codes 0.
#include "floats.cuh"

const int BLOCK = 32 * GROUP;

struct snorm8 {
    typedef u8 Code;
    static __device__ inline float largest() { return 127; }
    static __device__ inline float domain(float x) { return x; }
    static __device__ inline u32 encode(float x, float scale) {
        return (u32)max(-127, min(127, __float2int_rn(__fdiv_rn(x, scale))));
    }
    static __device__ inline float decode(u32 code) { return __int2float_rn((signed char)code); }
};

template <class Bits, int LARGEST>
struct unorm {
    typedef Bits Code;
    static __device__ inline float largest() { return LARGEST; }
    static __device__ inline float domain(float x) { return x < 0 ? 0 : x; }
    static __device__ inline u32 encode(float x, float scale) {
        return (u32)max(x > 0 ? 1 : 0, min(LARGEST, __float2int_rn(__fdiv_rn(x, scale))));
    }
    static __device__ inline float decode(u32 code) { return __int2float_rn((int)code); }
};
typedef unorm<u8, 255> unorm8;
typedef unorm<u16, 65535> unorm16;

struct e4m3 {
    typedef u8 Code;
    static __device__ inline float largest() { return 448; }
    static __device__ inline float domain(float x) { return x; }
    static __device__ inline u32 encode(float x, float scale) {
        u32 bits = __float_as_uint(__fdiv_rn(x, scale));
        u32 magnitude = bits & 0x7FFFFFFF;
        u32 odd = (magnitude >> 20) & 1;
        u32 normal = (magnitude - (120 << 23) + 0x7FFFF + odd) >> 20;
        // The least bit of 2**14 weighs 2**-9, as an e4m3 subnormal's does: the addition rounds to it.
        u32 subnormal = __float_as_uint(__uint_as_float(magnitude) + 16384.0f) - __float_as_uint(16384.0f);
        u32 finite = magnitude < (127 - 6) << 23 ? subnormal : normal;
        return (magnitude < (127 + 9) << 23 ? min(finite, 0x7Eu) : 0x7E) | (bits >> 24 & 0x80);
    }
    static __device__ inline float decode(u32 code) {
        float magnitude = __uint_as_float((code & 0x7F) << 20) * __uint_as_float((127 + 120) << 23);
        u32 bits = (code & 0x7F) == 0x7F ? 0x7FC00000 : __float_as_uint(magnitude);
        return __uint_as_float(bits | (code & 0x80) << 24);
    }
};

__device__ inline void store_codes(u8* to, const u32 (&codes)[GROUP]) {
    u32 words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < GROUP; i++) words[i / 4] |= (codes[i] & 0xFF) << 8 * (i % 4);
    __stcs((uint2*)to, make_uint2(words[0], words[1]));
}

__device__ inline void load_codes(const u8* from, u32 (&codes)[GROUP]) {
    uint2 words = __ldcs((const uint2*)from);
#pragma unroll
    for (int i = 0; i < GROUP; i++) codes[i] = ((i < 4 ? words.x : words.y) >> 8 * (i % 4)) & 0xFF;
}

__device__ inline void store_codes(u16* to, const u32 (&codes)[GROUP]) { store_vectors(to, codes); }
__device__ inline void load_codes(const u16* from, u32 (&codes)[GROUP]) { load_vectors(from, codes); }

// The scale of the warp's block; the same in every lane. As integers, magnitudes order like floats, NaN above all.
template <class Format>
__device__ inline float block_scale(const float (&x)[GROUP]) {
    u32 greatest = 0;
#pragma unroll
    for (int i = 0; i < GROUP; i++) greatest = max(greatest, __float_as_uint(x[i]) & 0x7FFFFFFF);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) greatest = max(greatest, __shfl_xor_sync(0xFFFFFFFF, greatest, lanes));
    bool finite = greatest < 0x7F800000;
    return finite ? __fdiv_rn(__uint_as_float(greatest), Format::largest()) : __uint_as_float(0x7FC00000);
}

template <class Format>
__device__ inline void quantise(i64 numel, const u32* from, typename Format::Code* codes, float* scales) {
    int lane = threadIdx.x % 32;
    i64 blocks = (numel + BLOCK - 1) / BLOCK, warps = (i64)gridDim.x * (THREADS / 32);
    for (i64 b = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; b < blocks; b += warps) {
        i64 at = b * BLOCK + lane * GROUP;
        int count = (int)max((i64)0, min((i64)GROUP, numel - at));
        float x[GROUP];
        read_group<f32>(from + at, count, x);
#pragma unroll
        for (int i = 0; i < GROUP; i++) x[i] = Format::domain(x[i]);
        float scale = block_scale<Format>(x);
        u32 bits[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) bits[i] = scale > 0 ? Format::encode(x[i], scale) : 0;
        if (lane == 0) scales[b] = scale;
        if (count == GROUP) {
            store_codes(codes + at, bits);
        } else {
#pragma unroll
            for (int i = 0; i < GROUP; i++)
                if (i < count) codes[at + i] = (typename Format::Code)bits[i];
        }
    }
}

template <class Format>
__device__ inline void dequantise(i64 numel, const typename Format::Code* codes, const float* scales, u32* to) {
    i64 step = (i64)gridDim.x * THREADS * GROUP;
    for (i64 at = ((i64)blockIdx.x * THREADS + threadIdx.x) * GROUP; at < numel; at += step) {
        int count = (int)min((i64)GROUP, numel - at);
        u32 bits[GROUP];
        if (count == GROUP) {
            load_codes(codes + at, bits);
        } else {
#pragma unroll
            for (int i = 0; i < GROUP; i++) bits[i] = i < count ? codes[at + i] : 0;
        }
        float scale = scales[at / BLOCK], x[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) x[i] = Format::decode(bits[i]) * scale;
        write_group<f32>(to + at, count, x);
    }
}

#define QUANTISE(Format)                                                                                           \
    KERNEL quantise_##Format(i64 numel, const u32* from, Format::Code* codes, float* scales) {                     \
        quantise<Format>(numel, from, codes, scales);                                                              \
    }                                                                                                              \
    KERNEL dequantise_##Format(i64 numel, const Format::Code* codes, const float* scales, u32* to) {               \
        dequantise<Format>(numel, codes, scales, to);                                                              \
    }

QUANTISE(snorm8)
QUANTISE(unorm8)
QUANTISE(unorm16)
QUANTISE(e4m3)
