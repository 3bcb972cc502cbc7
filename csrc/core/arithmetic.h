// What the update rules (rules.h) and sums are made of: fp32 arithmetic on one element, used by the
// CPU loops, the CUDA kernels and their tests. Every backend compiles these functions without
// contraction into fused multiply-adds (-ffp-contract=off, -fmad=false), so that the CPU variants
// and the CUDA kernels give the same bits. The kernels wait for memory, so the few extra
// instructions are free.
#pragma once

#include "hyper.h"

namespace hdet {

// a + weight * (b - a) from the end that is nearer, as torch.lerp does: exact at weight 0 and at
// weight 1.
HDET_HD float lerp(float a, float b, float weight, float rest) {
  return weight < 0.5f ? a + weight * (b - a) : b - rest * (b - a);
}

// One term of a weighted sum, left out at weight 0, where 0 times NaN or infinity would be NaN: a
// decay or a momentum that is off, a replica that is not in the mean.
HDET_HD float add_weighted(float sum, float weight, float x) {
  return weight == 0.0f ? sum : sum + weight * x;
}

// -1, 0 or 1; 0 for NaN.
HDET_HD float sign(float x) { return static_cast<float>(x > 0.0f) - static_cast<float>(x < 0.0f); }

// Within limits; NaN stays NaN.
HDET_HD float clip(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

HDET_HD bool is_cautious(const ReplicaRow& replica) {
  return bits_of(replica.step_size) >> 31 != 0;
}

// Eq. 2 with decoupled decay: theta_r <- theta_r - eta rho_r (u + decay). Cautious decay (Chen et
// al. 2025) acts where u theta >= 0; a loop that knows that none is cautious need not ask.
template <bool kMayBeCautious = true>
HDET_HD float take_step(const ReplicaRow& replica, float param, float direction) {
  if (!kMayBeCautious) return param * replica.decay - replica.step_size * direction;
  const float decay = direction * param < 0.0f && is_cautious(replica) ? 1.0f : replica.decay;
  return param * decay - float_of(bits_of(replica.step_size) & 0x7fffffffu) * direction;
}

// An average of the weights over time, which takes in what a step has made of the parameter.
HDET_HD float averaged(const EmaRow& row, float average, float param) {
  return row.weight == 1.0f ? param : lerp(average, param, row.weight, row.rest);
}

// Where a weighted sum starts. Minus zero is the neutral element of addition for every float, plus
// zero is not (-0 + +0 = +0).
constexpr float kEmptySum = -0.0f;

// A number on its way into a weighted sum, or out of it. Factor 0 gives 0, also where x is NaN or
// infinite.
HDET_HD float scaled(float factor, float x) { return factor == 0.0f ? 0.0f : factor * x; }

}  // namespace hdet
