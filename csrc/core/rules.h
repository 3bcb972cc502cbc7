// The update rules: fp32 arithmetic on one element, written once and used by the CPU loops, the CUDA kernels and their tests.
//
// A rule turns the gradient into new moments and a direction u, which all replicas share; each replica then takes its own step
// along u (Eq. 2). Every backend compiles these functions without contraction into fused multiply-adds (-ffp-contract=off,
// -fmad=false), so that the CPU variants and the CUDA kernels give the same bits. The kernels wait for memory, so the few extra
// instructions are free.
#pragma once

#include "hyper.h"

namespace hdet {

// a + weight * (b - a) from the end that is nearer, as torch.lerp does: exact at weight 0 and at weight 1.
HDET_HD float lerp(float a, float b, float weight, float rest) {
  return weight < 0.5f ? a + weight * (b - a) : b - rest * (b - a);
}

// One term of a weighted sum, left out at weight 0, where 0 times NaN or infinity would be NaN: a decay or a momentum that is off, a
// replica that is not in the mean.
HDET_HD float add_weighted(float sum, float weight, float x) { return weight == 0.0f ? sum : sum + weight * x; }

// Each rule keeps a first moment, and says whether it keeps a second. Whether its decay is coupled stands in hyper.h: is_coupled.
// `gradient` is scaled (HyperRow::gradient_scale); `param` is read by coupled rules.

// AdamW (Loshchilov and Hutter 2019, Algorithm 2), in the order of torch.optim.AdamW.
struct AdamWRule {
  static constexpr bool kSecond = true, kCoupled = is_coupled(Rule::adamw);

  HDET_HD float direction(const HyperRow& row, float gradient, float /*param*/, float& exp_avg, float& exp_avg_sq) {
    exp_avg = lerp(exp_avg, gradient, row.lerp1, row.beta1);
    exp_avg_sq = row.beta2 * exp_avg_sq + row.lerp2 * gradient * gradient;
    return exp_avg / (square_root(exp_avg_sq) * row.inv_sqrt_correction2 + row.eps);
  }
};

// Adam (Kingma and Ba 2015) with L2 regularisation added to the gradient, as torch.optim.Adam.
struct AdamRule {
  static constexpr bool kSecond = true, kCoupled = is_coupled(Rule::adam);

  HDET_HD float direction(const HyperRow& row, float gradient, float param, float& exp_avg, float& exp_avg_sq) {
    return AdamWRule::direction(row, add_weighted(gradient, row.coupled_decay, param), param, exp_avg, exp_avg_sq);
  }
};

// SGD with momentum, dampening, Nesterov and coupled decay, as torch.optim.SGD. lerp1 is 1 - dampening, and 1 in the first step.
struct SgdRule {
  static constexpr bool kSecond = false, kCoupled = is_coupled(Rule::sgd);

  HDET_HD float direction(const HyperRow& row, float gradient, float param, float& momentum_buffer, float& /*unused*/) {
    const float g = add_weighted(gradient, row.coupled_decay, param);
    momentum_buffer = add_weighted(row.lerp1 * g, row.beta1, momentum_buffer);
    return row.nesterov != 0.0f ? g + row.beta1 * momentum_buffer : momentum_buffer;  // one condition more, and GCC 12 no longer vectorises
  }
};

// Lion (Chen et al. 2023, Algorithm 2).
struct LionRule {
  static constexpr bool kSecond = false, kCoupled = is_coupled(Rule::lion);

  HDET_HD float direction(const HyperRow& row, float gradient, float /*param*/, float& exp_avg, float& /*unused*/) {
    const float c = lerp(exp_avg, gradient, row.lerp1, row.beta1);
    exp_avg = lerp(exp_avg, gradient, row.lerp2, row.beta2);
    return static_cast<float>(c > 0.0f) - static_cast<float>(c < 0.0f);
  }
};

// Eq. 2 with decoupled decay: theta_r <- theta_r - eta rho_r (u + decay).
HDET_HD float take_step(const ReplicaRow& replica, float param, float direction) {
  return param * replica.decay - replica.step_size * direction;
}

// Where a weighted sum starts. Minus zero is the neutral element of addition for every float, plus zero is not (-0 + +0 = +0).
constexpr float kEmptySum = -0.0f;

// A number on its way into a weighted sum, or out of it. Factor 0 gives 0, also where x is NaN or infinite.
HDET_HD float scaled(float factor, float x) { return factor == 0.0f ? 0.0f : factor * x; }

}  // namespace hdet
