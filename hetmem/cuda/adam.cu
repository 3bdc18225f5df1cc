// AdamW, bit for bit the host's kernel (hetmem.cpu): one pass that may emit a 16-bit copy. Computed in float32.
//
// State may lie on the device or in mapped host memory: each byte is read once and written once, streaming.
// torch's kernel on the host computes the elements behind its last full vector one by one, where the compiler has fused
// the other product of v: from `body` on this kernel does too.
#include "floats.cuh"

// As the host prepares them, each rounded once from fp64; hetmem/cuda/kernels.py names them in this order.
struct Scalars {
    float sign, decay, lerp, beta2, square, bias, eps, negative_step;
};

// `g` counts `sign` times, rounded as the state is: that is where the host scales it.
template <class State>
__device__ inline void adamw_element(const Scalars& s, bool in_vector, float& p, float g, float& m, float& v) {
    g = State::widen(State::round(s.sign * g));
    m = __fmaf_rn(s.lerp, g - m, s.lerp > 0 ? m : g);
    float x = s.square * g;
    v = in_vector ? __fmaf_rn(x, g, s.beta2 * v) : __fmaf_rn(s.beta2, v, x * g);
    p = p * s.decay + __fdiv_rn(s.negative_step * m, __fdiv_rn(__fsqrt_rn(v), s.bias) + s.eps);
}

struct NoCopy {
    typedef u16 Bits;
    static __device__ inline void write(Bits*, int, const float (&)[GROUP]) {}
};

template <class To>
struct Copy {
    typedef typename To::Bits Bits;
    static __device__ inline void write(Bits* to, int count, const float (&x)[GROUP]) { write_group<To>(to, count, x); }
};

template <class State, class Gradient, class Output>
__device__ inline void adamw(i64 numel, i64 body, typename State::Bits* param, const typename Gradient::Bits* grad,
                             typename State::Bits* exp_avg, typename State::Bits* exp_avg_sq,
                             typename Output::Bits* copy, const Scalars& scalars) {
    i64 step = (i64)gridDim.x * THREADS * GROUP;
    for (i64 at = ((i64)blockIdx.x * THREADS + threadIdx.x) * GROUP; at < numel; at += step) {
        int count = (int)min((i64)GROUP, numel - at);
        float p[GROUP], g[GROUP], m[GROUP], v[GROUP];
        read_group<State>(param + at, count, p);
        read_group<Gradient>(grad + at, count, g);
        read_group<State>(exp_avg + at, count, m);
        read_group<State>(exp_avg_sq + at, count, v);
#pragma unroll
        for (int i = 0; i < GROUP; i++) adamw_element<State>(scalars, at + i < body, p[i], g[i], m[i], v[i]);
        write_group<State>(param + at, count, p);
        write_group<State>(exp_avg + at, count, m);
        write_group<State>(exp_avg_sq + at, count, v);
        Output::write(copy + at, count, p);
    }
}

#define ADAMW(State, Gradient, name, Output)                                                                           \
    KERNEL adamw_##State##_##Gradient##_##name(i64 numel, i64 body, State::Bits* param, const Gradient::Bits* grad,    \
                                               State::Bits* exp_avg, State::Bits* exp_avg_sq, Output::Bits* copy,      \
                                               float sign, float decay, float lerp, float beta2, float square,         \
                                               float bias, float eps, float negative_step) {                           \
        Scalars scalars = {sign, decay, lerp, beta2, square, bias, eps, negative_step};                                \
        adamw<State, Gradient, Output>(numel, body, param, grad, exp_avg, exp_avg_sq, copy, scalars);                  \
    }
#define ADAMWS(Gradient)                                                                                               \
    ADAMW(f32, Gradient, none, NoCopy) ADAMW(f32, Gradient, bf16, Copy<bf16>) ADAMW(f32, Gradient, f16, Copy<f16>)

ADAMWS(f32)
ADAMWS(bf16)
ADAMWS(f16)
ADAMW(bf16, bf16, none, NoCopy)
ADAMW(f16, f16, none, NoCopy)
