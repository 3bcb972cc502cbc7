// What the headers of this folder need from the compiler that reads them: g++, clang++ or nvcc, for
// a host or for a GPU.
#pragma once

#include <cstdint>

// `static` on purpose: the CPU loops are compiled several times with different instruction sets,
// and a shared (comdat) copy of one of these functions could be taken from a translation unit that
// needs AVX-512.
#if defined(__CUDACC__)
#define HDET_HD static __forceinline__ __host__ __device__
#else
#define HDET_HD static inline __attribute__((always_inline))
#endif

#if defined(__CUDA_ARCH__)
// several turns at a time would take registers that there are not
#define HDET_ROLLED _Pragma("unroll 1")
#else
#define HDET_ROLLED
#endif

// Before a function for host and device that calls an argument, which may be for one of them.
#if defined(__CUDACC__)
#define HDET_HD_OF_CALL _Pragma("nv_exec_check_disable")
#else
#define HDET_HD_OF_CALL
#endif

namespace hdet {

HDET_HD uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

HDET_HD float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

HDET_HD float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

HDET_HD double square_root(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);
#endif
}

}  // namespace hdet
