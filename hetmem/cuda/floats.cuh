// The formats every kernel reads and writes, and how: groups of eight elements, 16 bytes an access where aligned.
//
// Rounding: to nearest, ties to even, subnormals kept, overflow to infinity. NaN: any becomes the quiet NaN without a
// payload. Integer arithmetic but for two exact float operations, so no header is needed and every compiler agrees;
// compile with -ftz=false -fmad=false.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

const int THREADS = 256;  // of every block
const int GROUP = 8;      // elements a thread handles at a time: 16 bytes of a 16-bit format, 32 of float32

// Four blocks a multiprocessor: half of the threads that most hold, enough to hide the memory's latency.
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 4)

__device__ inline bool is_nan_bits(u32 bits) { return (bits & 0x7FFFFFFF) > 0x7F800000; }

struct f32 {
    typedef u32 Bits;
    static __device__ inline float widen(Bits bits) { return __uint_as_float(bits); }
    static __device__ inline Bits round(float x) { return __float_as_uint(x); }
};

struct bf16 {
    typedef u16 Bits;
    static __device__ inline float widen(Bits bits) { return __uint_as_float((u32)bits << 16); }
    static __device__ inline Bits round(float x) {
        u32 bits = __float_as_uint(x);
        u32 odd = (bits >> 16) & 1;
        return is_nan_bits(bits) ? 0x7FC0 : (bits + 0x7FFF + odd) >> 16;
    }
};

struct f16 {
    typedef u16 Bits;
    static __device__ inline float widen(Bits bits) {
        // As the bits of a float32 the exponent is short by 112; multiplying is exact, also from a subnormal.
        u32 magnitude = __float_as_uint(__uint_as_float((bits & 0x7FFFu) << 13) * __uint_as_float((127 + 112) << 23));
        u32 special = (bits & 0x7C00) == 0x7C00 ? 0x7F800000 : 0;
        return __uint_as_float(magnitude | special | (bits & 0x8000u) << 16);
    }
    static __device__ inline Bits round(float x) {
        u32 bits = __float_as_uint(x);
        u32 magnitude = bits & 0x7FFFFFFF;
        u32 odd = (magnitude >> 13) & 1;
        u32 normal = (magnitude - (112 << 23) + 0xFFF + odd) >> 13;
        // The least bit of 0.5 weighs 2**-24, as a float16 subnormal's does: the addition rounds to it.
        u32 subnormal = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - (126 << 23);
        u32 special = is_nan_bits(bits) ? 0x7E00 : 0x7C00;
        u32 finite = magnitude < (127 - 14) << 23 ? subnormal : normal;
        return (magnitude < (127 + 16) << 23 ? finite : special) | (bits >> 16 & 0x8000);
    }
};

// ---- Groups. A full group at an address that is a multiple of 16 takes vector accesses; any other, single elements.
// __ldcs and __stcs: each byte is used once, and the compiler learns that the address is global (not shared) memory.

__device__ inline bool takes_vectors(const void* address, int count) { return count == GROUP && ((u64)address & 15) == 0; }

__device__ inline void load_vectors(const u32* from, u32 (&bits)[GROUP]) {
    uint4 low = __ldcs((const uint4*)from), high = __ldcs((const uint4*)from + 1);
    bits[0] = low.x, bits[1] = low.y, bits[2] = low.z, bits[3] = low.w;
    bits[4] = high.x, bits[5] = high.y, bits[6] = high.z, bits[7] = high.w;
}

__device__ inline void load_vectors(const u16* from, u32 (&bits)[GROUP]) {
    uint4 words = __ldcs((const uint4*)from);
    bits[0] = words.x & 0xFFFF, bits[1] = words.x >> 16, bits[2] = words.y & 0xFFFF, bits[3] = words.y >> 16;
    bits[4] = words.z & 0xFFFF, bits[5] = words.z >> 16, bits[6] = words.w & 0xFFFF, bits[7] = words.w >> 16;
}

__device__ inline void store_vectors(u32* to, const u32 (&bits)[GROUP]) {
    __stcs((uint4*)to, make_uint4(bits[0], bits[1], bits[2], bits[3]));
    __stcs((uint4*)to + 1, make_uint4(bits[4], bits[5], bits[6], bits[7]));
}

__device__ inline void store_vectors(u16* to, const u32 (&bits)[GROUP]) {
    __stcs((uint4*)to, make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                                  bits[6] | bits[7] << 16));
}

// `count` elements (at most GROUP) widened into x; the rest of x becomes 0.
template <class From>
__device__ inline void read_group(const typename From::Bits* from, int count, float (&x)[GROUP]) {
    u32 bits[GROUP];
    if (takes_vectors(from, count)) {
        load_vectors(from, bits);
    } else {
#pragma unroll
        for (int i = 0; i < GROUP; i++) bits[i] = i < count ? __ldcs(from + i) : 0;
    }
#pragma unroll
    for (int i = 0; i < GROUP; i++) x[i] = From::widen(bits[i]);
}

// The first `count` of x, rounded.
template <class To>
__device__ inline void write_group(typename To::Bits* to, int count, const float (&x)[GROUP]) {
    u32 bits[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) bits[i] = To::round(x[i]);
    if (takes_vectors(to, count)) {
        store_vectors(to, bits);
    } else {
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            if (i < count) __stcs(to + i, (typename To::Bits)bits[i]);
    }
}
