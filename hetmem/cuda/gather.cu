// The rows of a table that a batch reads, from where they lie (page-locked host memory), cast on the way.
//
// A row that the table does not have is not read: its place becomes NaN.
#include "floats.cuh"

template <class From, class To>
__device__ inline void gather(i64 rows, i64 width, i64 count, const typename From::Bits* table, const i64* indices,
                              typename To::Bits* to) {
    i64 groups = (width + GROUP - 1) / GROUP;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < count * groups; i += (i64)gridDim.x * THREADS) {
        i64 place = i / groups, column = i % groups * GROUP, row = indices[place];
        int n = (int)min((i64)GROUP, width - column);
        float x[GROUP];
        if (row >= 0 && row < rows) {
            read_group<From>(table + row * width + column, n, x);
        } else {
#pragma unroll
            for (int k = 0; k < GROUP; k++) x[k] = __uint_as_float(0x7FC00000);
        }
        write_group<To>(to + place * width + column, n, x);
    }
}

#define GATHER(From, To)                                                                                           \
    KERNEL gather_##From##_##To(i64 rows, i64 width, i64 count, const From::Bits* table, const i64* indices,         \
                                To::Bits* to) {                                                                    \
        gather<From, To>(rows, width, count, table, indices, to);                                                  \
    }

GATHER(f32, f32)
GATHER(f32, bf16)
GATHER(f32, f16)
GATHER(bf16, bf16)
GATHER(bf16, f32)
GATHER(f16, f16)
GATHER(f16, f32)
