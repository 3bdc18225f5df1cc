// The rows of a table that a batch touches, read where they lie (pinned host memory) and cast on the way.
//
// A row that the table lacks is never read: its place becomes NaN.
#include "floats.cuh"

const int PART = THREADS * GROUP;  // elements of a row that a block moves at a time

template <class From, class To>
__device__ inline void gather_rows(const typename From::Bits* table, i64 rows, i64 width, const i64* indices, i64 count,
                                   typename To::Bits* to) {
    i64 parts = (width + PART - 1) / PART;
    for (i64 i = blockIdx.x; i < count * parts; i += gridDim.x) {
        i64 place = i / parts, start = i % parts * PART, row = indices[place];
        int n = (int)min((i64)PART, width - start);
        typename To::Bits* out = to + place * width + start;
        if (row >= 0 && row < rows) {
            cast_run<From, To>(table + row * width + start, out, n);
        } else {
            for (int k = threadIdx.x; k < n; k += THREADS) __stcs(out + k, To::round(__uint_as_float(0x7FC00000)));
        }
    }
}

#define GATHER(From, To)                                                                                           \
    KERNEL gather_##From##_##To(const From::Bits* table, i64 rows, i64 width, const i64* indices, i64 count,          \
                             To::Bits* to) {                                                                       \
        gather_rows<From, To>(table, rows, width, indices, count, to);                                             \
    }

GATHER(f32, f32)
GATHER(f32, bf16)
GATHER(f32, f16)
GATHER(bf16, f32)
GATHER(f16, f32)
GATHER(bf16, bf16)
GATHER(f16, f16)
