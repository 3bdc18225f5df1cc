// Gradients on their way out: one pass casts, scales, adds or overwrites, and sums the squares of what it wrote.
//
// The sums are fp64 and their order is fixed by the plan alone, not by the grid or the addresses: a thread adds up its
// own elements in order, the block its threads as a tree, `sum_partials` the tiles the same way. The square of a
// float32 is exact in fp64 and cannot overflow, so the sum is finite exactly if every element is: it is the check.
#include "floats.cuh"

// The sum of every thread's x; thread 0 alone may use it.
__device__ inline double block_sum(double x) {
    __shared__ double sums[THREADS];
    sums[threadIdx.x] = x;
    __syncthreads();
    for (unsigned half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    return sums[0];
}

struct Overwrite {
    template <class To>
    static __device__ inline void apply(const typename To::Bits*, int, float (&)[GROUP]) {}
};

struct Add {
    template <class To>
    static __device__ inline void apply(const typename To::Bits* to, int count, float (&x)[GROUP]) {
        float old[GROUP];
        read_group<To>(to, count, old);
#pragma unroll
        for (int i = 0; i < GROUP; i++) x[i] = old[i] + x[i];
    }
};

template <class From, class To, class Mode>
__device__ inline void gradient_out(const Tile* tiles, i64 tile_count, const typename From::Bits* from,
                                    typename To::Bits* to, float scale, double* partials) {
    for (i64 t = blockIdx.x; t < tile_count; t += gridDim.x) {
        Tile tile = tiles[t];
        double sum = 0;
        for (int start = threadIdx.x * GROUP; start < tile.count; start += THREADS * GROUP) {
            int count = min(GROUP, (int)tile.count - start);
            float x[GROUP];
            read_group<From>(from + tile.from + start, count, x);
#pragma unroll
            for (int i = 0; i < GROUP; i++) x[i] = x[i] * scale;
            Mode::template apply<To>(to + tile.to + start, count, x);
            write_group<To>(to + tile.to + start, count, x);
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                double written = To::widen(To::round(x[i]));
                sum += written * written;  // 0 past the end
            }
        }
        double total = block_sum(sum);
        if (threadIdx.x == 0) partials[t] = total;
    }
}

#define GRADIENT(From, To, name, Mode)                                                                             \
    KERNEL gradient_##From##_##To##_##name(const Tile* tiles, i64 tile_count, const From::Bits* from, To::Bits* to,   \
                                        float scale, double* partials) {                                           \
        gradient_out<From, To, Mode>(tiles, tile_count, from, to, scale, partials);                                \
    }
#define GRADIENTS(From, To) GRADIENT(From, To, overwrite, Overwrite) GRADIENT(From, To, add, Add)

GRADIENTS(f32, f32)
GRADIENTS(bf16, f32)
GRADIENTS(f16, f32)
GRADIENTS(f32, bf16)
GRADIENTS(f32, f16)
GRADIENTS(bf16, bf16)
GRADIENTS(f16, f16)

// One block: the sum of `count` partials, and 1 in *not_finite if it is no finite number, else 0.
KERNEL sum_partials(const double* partials, i64 count, double* total, u32* not_finite) {
    double sum = 0;
    for (i64 i = threadIdx.x; i < count; i += THREADS) sum += partials[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        *total = sum;
        *not_finite = !(sum - sum == 0);  // infinity - infinity and NaN - NaN are NaN, which equals nothing
    }
}
