// Sums of squares in float64, one for each run of 4096 elements, in the order of the host's loop (hetmem.cpu).
//
// Element i of a run goes to lane i % 64; the lanes' sums are added by halves. Eight threads do one run, each of them the
// eight lanes that lie in a group. A square of a float32 is exact in float64, so the fused sum is rounded once, as the
// host's. A sum is infinite or NaN if and only if an element is: the greatest of 2**24 squares would not overflow.
#include "floats.cuh"

const int LANES = 64;
const int RUN = 64 * LANES;
const int TEAM = LANES / GROUP;  // threads that do one run; a warp has several teams
const int WARP = 32;

template <class From>
__device__ inline double square_sum(const typename From::Bits* from, int count) {
    int first = threadIdx.x % TEAM * GROUP;
    double lanes[GROUP] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 4
    for (int start = first; start < count; start += LANES) {
        float x[GROUP];
        read_group<From>(from + start, min(GROUP, count - start), x);
#pragma unroll
        for (int i = 0; i < GROUP; i++) lanes[i] = __fma_rn((double)x[i], (double)x[i], lanes[i]);
    }
#pragma unroll
    for (int other = TEAM / 2; other > 0; other /= 2)
#pragma unroll
        for (int i = 0; i < GROUP; i++) lanes[i] += __shfl_xor_sync(0xFFFFFFFF, lanes[i], other);
#pragma unroll
    for (int half = GROUP / 2; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

template <class From>
__device__ inline void square_sums(i64 numel, const typename From::Bits* from, double* sums) {
    i64 runs = (numel + RUN - 1) / RUN, step = (i64)gridDim.x * (THREADS / TEAM);
    i64 first = (i64)blockIdx.x * (THREADS / TEAM) + threadIdx.x / WARP * (WARP / TEAM);
    for (; first < runs; first += step) {  // the whole warp stays: its teams may only shuffle together
        i64 run = first + threadIdx.x % WARP / TEAM;
        int count = (int)max((i64)0, min((i64)RUN, numel - run * RUN));
        double sum = square_sum<From>(from + run * RUN, count);
        if (count > 0 && threadIdx.x % TEAM == 0) sums[run] = sum;
    }
}

#define SQUARES(From)                                                                                                  \
    KERNEL square_sums_##From(i64 numel, const From::Bits* from, double* sums) { square_sums<From>(numel, from, sums); }

SQUARES(f32)
SQUARES(bf16)
SQUARES(f16)
