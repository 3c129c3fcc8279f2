// arch: the one place that knows which machine compiles this, an NVIDIA GPU or the SIMT machine on a CPU.
//
// A primitive has two bodies under one signature: the instruction, and a call to the SIMT machine's function
// of the same name. The SIMT body passes on `site`, the file and line of the kernel that called, so that
// reports name the caller.
#pragma once

#if defined(CUATTN_SIMT)
#include "simt/lang.h"
#define SITE , simt::Site site = simt::Site::here()
#define SITE_ONLY simt::Site site = simt::Site::here()
#define AT_SITE , site
#define ONLY_AT_SITE site
#else
// NVRTC ships no <stdint.h> and no INFINITY.
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define INFINITY __int_as_float(0x7f800000)
#define SITE
#define SITE_ONLY
#define AT_SITE
#define ONLY_AT_SITE
#endif

#define DEVICE static __device__ __forceinline__
#define METHOD __device__ __forceinline__
#define KERNEL(threads, blocks_per_sm) extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm)

constexpr int WARP = 32;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
