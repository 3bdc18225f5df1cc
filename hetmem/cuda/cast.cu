// Casts between float32 and a 16-bit format. Rounding and NaN: floats.cuh.
#include "floats.cuh"

template <class From, class To>
__device__ inline void cast(i64 numel, const typename From::Bits* from, typename To::Bits* to) {
    i64 step = (i64)gridDim.x * THREADS * GROUP;
    for (i64 at = ((i64)blockIdx.x * THREADS + threadIdx.x) * GROUP; at < numel; at += step) {
        int count = (int)min((i64)GROUP, numel - at);
        float x[GROUP];
        read_group<From>(from + at, count, x);
        write_group<To>(to + at, count, x);
    }
}

#define CAST(From, To)                                                                                             \
    KERNEL cast_##From##_##To(i64 numel, const From::Bits* from, To::Bits* to) { cast<From, To>(numel, from, to); }

CAST(f32, bf16)
CAST(f32, f16)
CAST(bf16, f32)
CAST(f16, f32)
