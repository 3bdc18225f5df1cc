// Casts between float32 and a 16-bit format: all tiles of a plan in one launch. Rounding and NaN: floats.cuh.
#include "floats.cuh"

#define CAST(From, To)                                                                                             \
    KERNEL cast_##From##_##To(const Tile* tiles, i64 tile_count, const From::Bits* from, To::Bits* to) {              \
        for (i64 i = blockIdx.x; i < tile_count; i += gridDim.x)                                                   \
            cast_run<From, To>(from + tiles[i].from, to + tiles[i].to, (int)tiles[i].count);                       \
    }

CAST(f32, bf16)
CAST(f32, f16)
CAST(bf16, f32)
CAST(f16, f32)
