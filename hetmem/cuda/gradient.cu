// Gradients on their way out: one pass casts, scales, and adds or overwrites.
#include "floats.cuh"

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
                                    typename To::Bits* to, float scale) {
    for (i64 t = blockIdx.x; t < tile_count; t += gridDim.x) {
        Tile tile = tiles[t];
        for (int start = threadIdx.x * GROUP; start < tile.count; start += THREADS * GROUP) {
            int count = min(GROUP, (int)tile.count - start);
            float x[GROUP];
            read_group<From>(from + tile.from + start, count, x);
#pragma unroll
            for (int i = 0; i < GROUP; i++) x[i] = x[i] * scale;
            Mode::template apply<To>(to + tile.to + start, count, x);
            write_group<To>(to + tile.to + start, count, x);
        }
    }
}

#define GRADIENT(From, To, name, Mode)                                                                             \
    KERNEL gradient_##From##_##To##_##name(const Tile* tiles, i64 tile_count, const From::Bits* from, To::Bits* to,   \
                                        float scale) {                                                             \
        gradient_out<From, To, Mode>(tiles, tile_count, from, to, scale);                                          \
    }
#define GRADIENTS(From, To) GRADIENT(From, To, overwrite, Overwrite) GRADIENT(From, To, add, Add)

GRADIENTS(f32, f32)
GRADIENTS(bf16, f32)
GRADIENTS(f16, f32)
GRADIENTS(f32, bf16)
GRADIENTS(f32, f16)
GRADIENTS(bf16, bf16)
GRADIENTS(f16, f16)
