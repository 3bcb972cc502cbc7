// The update rules: fp32 arithmetic on one element, written once and used by the CPU loops, the CUDA kernels and their tests.
//
// Every backend compiles these functions without contraction into fused multiply-adds (-ffp-contract=off, -fmad=false), so that
// the CPU variants and the CUDA kernels give the same bits. The kernels wait for memory, so the few extra instructions are free.
#pragma once

#include "hyper.h"

// `static` on purpose: the CPU loops are compiled several times with different instruction sets, and a shared (comdat) copy of
// one of these functions could be taken from a translation unit that needs AVX-512.
#if defined(__CUDACC__)
#define HDET_HD static __forceinline__ __host__ __device__
#else
#define HDET_HD static inline __attribute__((always_inline))
#endif

namespace hdet {

HDET_HD float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// a + weight * (b - a) from the end that is nearer, as torch.lerp does: exact at weight 0 and at weight 1.
HDET_HD float lerp(float a, float b, float weight, float rest) {
  return weight < 0.5f ? a + weight * (b - a) : b - rest * (b - a);
}

// One AdamW update of one element, in the order of torch.optim.AdamW: decay, first moment, second moment, step.
HDET_HD void adamw(const HyperRow& row, float gradient, float& param, float& exp_avg, float& exp_avg_sq) {
  const float g = row.sign * gradient;
  const float m = lerp(exp_avg, g, row.lerp1, row.beta1);
  const float v = row.beta2 * exp_avg_sq + row.lerp2 * g * g;
  const float denominator = square_root(v) * row.inv_sqrt_correction2 + row.eps;
  param = param * row.decay - row.step_size * m / denominator;
  exp_avg = m;
  exp_avg_sq = v;
}

// Where a weighted sum starts. Minus zero is the neutral element of addition for every float, plus zero is not (-0 + +0 = +0).
constexpr float kEmptySum = -0.0f;

// One term of a weighted mean. A replica of weight 0 is left out even where it holds NaN or infinity.
HDET_HD float add_weighted(float sum, float weight, float x) { return weight == 0.0f ? sum : sum + weight * x; }

}  // namespace hdet
