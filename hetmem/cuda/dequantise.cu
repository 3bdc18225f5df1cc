// Quantised weights to float32, bfloat16 or float16: a product or two in float32, rounded once. Formats: see
// hetmem/schedule/formats.py.
//
// `codes` begins with the code of element `first` of the weight, a multiple of 16384; `scales` with the first scale of
// that element where blocks are runs of elements, else with the weight's first. A thread handles eight elements: four
// bytes of 4-bit codes, or eight.
#include "floats.cuh"

const int NF4_BLOCK = 64;
const int MX_BLOCK = 32;
const int NESTED_BLOCK = 256;
const int FP8_TILE = 128;

__device__ const float NF4[16] = {
    -1.0f,                -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f,  0.7229568362236023f,  1.0f};

// Values of the 8-bit scales of nf4-nested: bitsandbytes' signed dynamic map.
__device__ const float DYNAMIC[256] = {
    -0.992968738f, -0.978906274f, -0.96484375f, -0.950781226f, -0.936718762f, -0.922656238f, -0.908593774f,
    -0.89453125f, -0.880468726f, -0.866406262f, -0.852343738f, -0.838281274f, -0.82421875f, -0.810156226f,
    -0.796093762f, -0.782031238f, -0.767968774f, -0.75390625f, -0.739843726f, -0.725781262f, -0.711718798f,
    -0.697656274f, -0.68359375f, -0.669531226f, -0.655468762f, -0.641406298f, -0.627343774f, -0.61328125f,
    -0.599218726f, -0.585156262f, -0.571093798f, -0.557031274f, -0.54296875f, -0.528906226f, -0.514843702f,
    -0.500781238f, -0.486718714f, -0.47265625f, -0.458593726f, -0.444531262f, -0.430468738f, -0.416406244f,
    -0.40234375f, -0.388281226f, -0.374218762f, -0.360156238f, -0.346093744f, -0.33203125f, -0.317968726f,
    -0.303906262f, -0.289843738f, -0.275781274f, -0.26171875f, -0.247656241f, -0.233593747f, -0.219531253f,
    -0.205468744f, -0.19140625f, -0.177343756f, -0.163281247f, -0.149218753f, -0.135156244f, -0.12109375f,
    -0.107031256f, -0.0985937491f, -0.0957812592f, -0.0929687545f, -0.0901562497f, -0.0873437524f, -0.0845312476f,
    -0.0817187577f, -0.078906253f, -0.0760937482f, -0.0732812509f, -0.0704687461f, -0.0676562563f, -0.0648437515f,
    -0.0620312504f, -0.0592187531f, -0.0564062484f, -0.053593751f, -0.05078125f, -0.047968749f, -0.0451562516f,
    -0.0423437469f, -0.0395312496f, -0.0367187522f, -0.0339062512f, -0.0310937501f, -0.028281251f, -0.0254687499f,
    -0.0226562507f, -0.0198437516f, -0.0170312505f, -0.0142187504f, -0.0114062503f, -0.00971874967f, -0.00915624946f,
    -0.00859375019f, -0.00803124998f, -0.00746874977f, -0.00690625003f, -0.00634374982f, -0.00578125007f,
    -0.00521875033f, -0.00465624966f, -0.00409374991f, -0.00353124971f, -0.00296874996f, -0.00240624999f,
    -0.00184375001f, -0.00128124992f, -0.000943750085f, -0.000831249985f, -0.00071875006f, -0.000606250076f,
    -0.000493750034f, -0.000381250022f, -0.000268750038f, -0.000156250011f, -8.87499991e-05f, -6.62500024e-05f,
    -4.37499984e-05f, -2.12499981e-05f, -7.7499999e-06f, -3.25000019e-06f, -5.50000038e-07f, 0.0f, 5.50000038e-07f,
    3.25000019e-06f, 7.7499999e-06f, 2.12499981e-05f, 4.37499984e-05f, 6.62500024e-05f, 8.87499991e-05f,
    0.000156250011f, 0.000268750038f, 0.000381250022f, 0.000493750034f, 0.000606250076f, 0.00071875006f,
    0.000831249985f, 0.000943750085f, 0.00128124992f, 0.00184375001f, 0.00240624999f, 0.00296874996f, 0.00353124971f,
    0.00409374991f, 0.00465624966f, 0.00521875033f, 0.00578125007f, 0.00634374982f, 0.00690625003f, 0.00746874977f,
    0.00803124998f, 0.00859375019f, 0.00915624946f, 0.00971874967f, 0.0114062503f, 0.0142187504f, 0.0170312505f,
    0.0198437516f, 0.0226562507f, 0.0254687499f, 0.028281251f, 0.0310937501f, 0.0339062512f, 0.0367187522f,
    0.0395312496f, 0.0423437469f, 0.0451562516f, 0.047968749f, 0.05078125f, 0.053593751f, 0.0564062484f,
    0.0592187531f, 0.0620312504f, 0.0648437515f, 0.0676562563f, 0.0704687461f, 0.0732812509f, 0.0760937482f,
    0.078906253f, 0.0817187577f, 0.0845312476f, 0.0873437524f, 0.0901562497f, 0.0929687545f, 0.0957812592f,
    0.0985937491f, 0.107031256f, 0.12109375f, 0.135156244f, 0.149218753f, 0.163281247f, 0.177343756f, 0.19140625f,
    0.205468744f, 0.219531253f, 0.233593747f, 0.247656241f, 0.26171875f, 0.275781274f, 0.289843738f, 0.303906262f,
    0.317968726f, 0.33203125f, 0.346093744f, 0.360156238f, 0.374218762f, 0.388281226f, 0.40234375f, 0.416406244f,
    0.430468738f, 0.444531262f, 0.458593726f, 0.47265625f, 0.486718714f, 0.500781238f, 0.514843702f, 0.528906226f,
    0.54296875f, 0.557031274f, 0.571093798f, 0.585156262f, 0.599218726f, 0.61328125f, 0.627343774f, 0.641406298f,
    0.655468762f, 0.669531226f, 0.68359375f, 0.697656274f, 0.711718798f, 0.725781262f, 0.739843726f, 0.75390625f,
    0.767968774f, 0.782031238f, 0.796093762f, 0.810156226f, 0.82421875f, 0.838281274f, 0.852343738f, 0.866406262f,
    0.880468726f, 0.89453125f, 0.908593774f, 0.922656238f, 0.936718762f, 0.950781226f, 0.96484375f, 0.978906274f,
    0.992968738f, 1.0f};

// The bits of an E2M1 number, without its sign, as those of a float32: exponent bias 1, one bit of mantissa.
__device__ inline float e2m1(u32 code) {
    u32 magnitude = code & 7;
    u32 bits = magnitude < 2 ? magnitude * (126 << 23) : (magnitude << 22) + (126 << 23);
    return __uint_as_float(bits | (code & 8) << 28);
}

// A scale of mxfp4: as a float32, 2 ** -127 has no exponent.
__device__ inline float e8m0(u32 exponent) { return __uint_as_float(exponent == 0 ? 1 << 22 : exponent << 23); }

// E4M3FN, exponent bias 7. As the bits of a float32 the exponent is short by 120; multiplying is exact.
__device__ inline float e4m3(u32 code) {
    u32 magnitude = __float_as_uint(__uint_as_float((code & 0x7F) << 20) * __uint_as_float((127 + 120) << 23));
    u32 nan = (code & 0x7F) == 0x7F ? 0x7FC00000 : 0;
    return __uint_as_float((nan ? nan : magnitude) | (code & 0x80) << 24);
}

// Codes of `count` elements, at most eight, one after the other from the lowest bits on.
__device__ inline u64 load_codes(const u8* codes, int bytes) {
    if (bytes == 8 && ((u64)codes & 7) == 0) {
        uint2 words = __ldcs((const uint2*)codes);
        return words.x | (u64)words.y << 32;
    }
    if (bytes == 4 && ((u64)codes & 3) == 0) return __ldcs((const u32*)codes);
    u64 found = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < bytes) found |= (u64)__ldcs(codes + i) << 8 * i;
    return found;
}

// The number of an element's row in the weight, and of its column.
struct Position {
    i64 row, column, columns;
    __device__ inline Position(i64 index, i64 columns) : row(index / columns), column(index % columns), columns(columns) {}
    // Goes on to the next element, and returns its column.
    __device__ inline i64 next() {
        if (++column == columns) column = 0, row++;
        return column;
    }
};

struct Weight {
    i64 first, rows, columns;
    const u8* codes;
    const u8* scales;
    const float* levels;  // of nf4-nested: the offset, and a scale for 256 scales
};

struct nf4 {
    static __device__ inline void decode(const Weight& w, i64 at, int count, float (&x)[GROUP]) {
        u64 codes = load_codes(w.codes + at / 2, (count + 1) / 2);
        float s = __ldcs((const float*)w.scales + at / NF4_BLOCK);
#pragma unroll
        for (int i = 0; i < GROUP; i++) x[i] = NF4[codes >> 4 * (i ^ 1) & 15] * s;
    }
};

struct nested {
    static __device__ inline void decode(const Weight& w, i64 at, int count, float (&x)[GROUP]) {
        u64 codes = load_codes(w.codes + at / 2, (count + 1) / 2);
        float level = w.levels[1 + (w.first + at) / NF4_BLOCK / NESTED_BLOCK];
        float unit = DYNAMIC[__ldcs(w.scales + at / NF4_BLOCK)] * level + w.levels[0];
#pragma unroll
        for (int i = 0; i < GROUP; i++) x[i] = NF4[(codes >> 4 * (i ^ 1) & 15)] * unit;
    }
};

struct mxfp4 {
    static __device__ inline void decode(const Weight& w, i64 at, int count, float (&x)[GROUP]) {
        u64 codes = load_codes(w.codes + at / 2, (count + 1) / 2);
        float s = e8m0(__ldcs(w.scales + at / MX_BLOCK));
#pragma unroll
        for (int i = 0; i < GROUP; i++) x[i] = e2m1((u32)(codes >> 4 * i & 15)) * s;
    }
};

struct fp8 {
    static __device__ inline float scale(const Weight& w, const Position& at) {
        i64 down = (w.rows + FP8_TILE - 1) / FP8_TILE, across = (w.columns + FP8_TILE - 1) / FP8_TILE;
        i64 tile = (at.row / w.rows * down + at.row % w.rows / FP8_TILE) * across + at.column / FP8_TILE;
        return ((const float*)w.scales)[tile];
    }
    static __device__ inline void decode(const Weight& w, i64 at, int count, float (&x)[GROUP]) {
        u64 codes = load_codes(w.codes + at, count);
        Position here(w.first + at, w.columns);
        float s = scale(w, here);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            if (i >= count) break;
            if (i > 0 && here.next() % FP8_TILE == 0) s = scale(w, here);
            x[i] = e4m3((u32)(codes >> 8 * i & 0xFF)) * s;
        }
    }
};

// Of rows with a scale each: of int8 that is an absmax, to be multiplied by 1 / 127.
template <bool ABSMAX>
struct scaled_rows {
    static __device__ inline void decode(const Weight& w, i64 at, int count, float (&x)[GROUP]) {
        u64 codes = load_codes(w.codes + at, count);
        const float* scales = (const float*)w.scales;
        Position here(w.first + at, w.columns);
        float s = scales[here.row];
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            if (i >= count) break;
            if (i > 0 && here.next() == 0) s = scales[here.row];
            x[i] = __int2float_rn((signed char)(codes >> 8 * i & 0xFF)) * s;
            if (ABSMAX) x[i] = x[i] * 0.007874015718698502f;
        }
    }
};

using int8 = scaled_rows<true>;
using scaled = scaled_rows<false>;

template <class Format, class To>
__device__ inline void dequantise(i64 numel, const Weight& weight, typename To::Bits* to) {
    i64 step = (i64)gridDim.x * THREADS * GROUP;
    for (i64 at = ((i64)blockIdx.x * THREADS + threadIdx.x) * GROUP; at < numel; at += step) {
        int count = (int)min((i64)GROUP, numel - at);
        float x[GROUP] = {0, 0, 0, 0, 0, 0, 0, 0};
        Format::decode(weight, at, count, x);
        write_group<To>(to + at, count, x);
    }
}

// mxfp4 of whole matrices whose blocks run along rows of the weight. A warp has 32 rows, those of a block, of 8 columns:
// it reads 16 bytes of codes and a scale for each column, and its neighbour writes beside it.
template <class To>
__device__ inline void dequantise_transposed(i64 numel, const Weight& w, typename To::Bits* to) {
    i64 groups = (w.columns + GROUP - 1) / GROUP, blocks = w.rows / MX_BLOCK;
    i64 all = numel / w.columns * groups;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < all; i += (i64)gridDim.x * THREADS) {
        i64 tile = i / MX_BLOCK, column = tile % groups * GROUP, block = tile / groups;
        i64 matrix = block / blocks, row = block % blocks * MX_BLOCK + i % MX_BLOCK;
        int count = (int)min((i64)GROUP, w.columns - column);
        float x[GROUP] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < GROUP; k++) {
            if (k >= count) break;
            i64 at = (matrix * w.columns + column + k) * w.rows + row;
            x[k] = e2m1(w.codes[at / 2] >> 4 * (at & 1) & 15) * e8m0(w.scales[at / MX_BLOCK]);
        }
        write_group<To>(to + (matrix * w.rows + row) * w.columns + column, count, x);
    }
}

#define TRANSPOSED(To)                                                                                                 \
    KERNEL dequantise_transposed_##To(i64 numel, i64 first, i64 rows, i64 columns, const u8* codes, const u8* scales,  \
                                      const float* levels, To::Bits* to) {                                             \
        dequantise_transposed<To>(numel, {first, rows, columns, codes, scales, levels}, to);                           \
    }

TRANSPOSED(f32)
TRANSPOSED(bf16)
TRANSPOSED(f16)

#define DEQUANTISE(Format, To)                                                                                         \
    KERNEL dequantise_##Format##_##To(i64 numel, i64 first, i64 rows, i64 columns, const u8* codes, const u8* scales,  \
                                      const float* levels, To::Bits* to) {                                             \
        dequantise<Format, To>(numel, {first, rows, columns, codes, scales, levels}, to);                              \
    }
#define DEQUANTISES(Format) DEQUANTISE(Format, f32) DEQUANTISE(Format, bf16) DEQUANTISE(Format, f16)

DEQUANTISES(nf4)
DEQUANTISES(nested)
DEQUANTISES(mxfp4)
DEQUANTISES(fp8)
DEQUANTISES(int8)
DEQUANTISES(scaled)
