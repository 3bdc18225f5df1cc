// Enough of CUDA for g++: the threads of a block run one after another, each until it ends or meets a barrier.
//
// Every thread is a fiber (ucontext). A barrier and a shuffle give way to the next fiber; the scheduler opens a barrier
// when all fibers it waits for have come, and stops the process when none can go on. Threads run upwards or downwards,
// so that code which needs an order gives two results.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class T> T __ldcs(const T* from) { return *from; }
template <class T> void __stcs(T* to, T value) { *to = value; }
template <class To, class From> To bits_as(From from) { To to; memcpy(&to, &from, sizeof to); return to; }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __int2float_rn(int x) { return (float)x; }
inline int __float2int_rn(float x) { return (int)lrintf(x); }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

static Index threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

enum Waits { NOTHING, FOR_WARP, FOR_BLOCK, ENDED };
struct Place { ucontext_t context; jmp_buf jump; bool left; };
struct Fiber { Place place; Waits waits; unsigned offered; };
static std::vector<Fiber> fibers;
static std::vector<char> stacks;
static Place scheduler;
static void (*body)(void*);
static void* body_argument;
const size_t STACK_BYTES = 64 << 10;

// Leave `here` for `there`. swapcontext asks the kernel for signal masks: it enters a fiber, jumps do the rest. (The
// address sanitiser takes a jump for the end of the frames between, which here live on.)
static void hop(Place& here, Place& there) {
#ifndef __SANITIZE_ADDRESS__
    if (there.left) {
        here.left = true;
        if (!_setjmp(here.jump)) _longjmp(there.jump, 1);
        return;
    }
    here.left = true;
    if (_setjmp(here.jump)) return;
#endif
    swapcontext(&here.context, &there.context);
}

static void give_way(Waits waits) {
    unsigned self = threadIdx.x;
    fibers[self].waits = waits;
    hop(fibers[self].place, scheduler);
    threadIdx.x = self;
}

static void start() {
    body(body_argument);
    give_way(ENDED);
}

// Whether all of fibers [first, last) wait for `what`; if so they may go on.
static bool open(unsigned first, unsigned last, Waits what) {
    for (unsigned i = first; i < last; i++)
        if (fibers[i].waits != what) return false;
    for (unsigned i = first; i < last; i++) fibers[i].waits = NOTHING;
    return true;
}

static void run_block(bool downwards) {
    unsigned threads = blockDim.x;
    fibers.resize(threads);
    stacks.resize(threads * STACK_BYTES);
    for (unsigned i = 0; i < threads; i++) {
        fibers[i].waits = NOTHING;
        fibers[i].place.left = false;
        ucontext_t& context = fibers[i].place.context;
        getcontext(&context);
        context.uc_stack.ss_sp = &stacks[i * STACK_BYTES];
        context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&context, start, 0);
    }
    for (bool progress = true; progress;) {
        progress = false;
        for (unsigned k = 0; k < threads; k++) {
            unsigned i = downwards ? threads - 1 - k : k;
            if (fibers[i].waits != NOTHING) continue;
            threadIdx.x = i;
            hop(scheduler, fibers[i].place);
            progress = true;
        }
        for (unsigned warp = 0; warp < threads; warp += 32) progress |= open(warp, min(warp + 32, threads), FOR_WARP);
        progress |= open(0, threads, FOR_BLOCK);
    }
    for (const Fiber& fiber : fibers)
        if (fiber.waits != ENDED) fprintf(stderr, "shim: not all threads came to a barrier\n"), abort();
}

// `body` for each thread of each block: as fibers if it has barriers, else as a plain loop (some 50 times faster).
static void run(unsigned grid, unsigned block, bool downwards, bool barriers) {
    gridDim.x = grid, blockDim.x = block;
    for (unsigned b = 0; b < grid; b++) {
        blockIdx.x = downwards ? grid - 1 - b : b;
        if (barriers) { run_block(downwards); continue; }
        for (unsigned k = 0; k < block; k++) {
            threadIdx.x = downwards ? block - 1 - k : k;
            body(body_argument);
        }
    }
}

template <class... A, size_t... I>
void launch(void (*kernel)(A...), void** arguments, unsigned grid, unsigned block, bool downwards, bool barriers,
            std::index_sequence<I...>) {
    auto call = [=] { kernel(*(A*)arguments[I]...); };
    body = [](void* argument) { (*(decltype(call)*)argument)(); };
    body_argument = &call;
    run(grid, block, downwards, barriers);
}

// As cuLaunchKernel: one pointer to each argument.
template <class... A>
void launch(void (*kernel)(A...), void** arguments, unsigned grid, unsigned block, bool downwards, bool barriers) {
    launch(kernel, arguments, grid, block, downwards, barriers, std::index_sequence_for<A...>{});
}

}  // namespace shim

inline void __syncthreads() { shim::give_way(shim::FOR_BLOCK); }
inline unsigned __shfl_xor_sync(unsigned, unsigned value, int lane_mask) {
    unsigned self = threadIdx.x;
    shim::fibers[self].offered = value;
    shim::give_way(shim::FOR_WARP);
    unsigned got = shim::fibers[self ^ lane_mask].offered;
    shim::give_way(shim::FOR_WARP);  // all have read before one offers again
    return got;
}

inline double __shfl_xor_sync(unsigned mask, double value, int lane_mask) {
    unsigned halves[2];
    memcpy(halves, &value, sizeof value);
    for (unsigned& half : halves) half = __shfl_xor_sync(mask, half, lane_mask);
    memcpy(&value, halves, sizeof value);
    return value;
}

// shim.py appends LAUNCHER(name, barriers) for every kernel.
#define LAUNCHER(name, barriers)                                                                         \
    extern "C" void launch_##name(void** arguments, unsigned grid, unsigned block, int downwards) {      \
        shim::launch(name, arguments, grid, block, downwards, barriers);                                 \
    }
