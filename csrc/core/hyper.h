// Hyperparameters: what the host writes (doubles), and what the kernels read (fp32 rows), derived on the device that runs the step.
//
// A kernel reads its row from memory, so changing a rate, a multiplier or a beta never changes a kernel's arguments: one small
// copy into the settings, and the next step (or the next replay of a captured one) acts on it.
#pragma once

#include "portable.h"

namespace hdet {

enum class Rule : int32_t { adamw = 0, adam = 1, sgd = 2, lion = 3 };

// One array of doubles, in this order: CallSettings, GroupSettings[groups], rho[groups][replicas] (Eq. 1).
// Of the whole call.
struct CallSettings {
  double max_norm;  // clip gradients to this global norm; infinity only measures it; 0: no norm at all
};

// Of a parameter group.
struct GroupSettings {
  double lr;  // where the group has no address of a rate in device memory
  double beta1;  // SGD: momentum
  double beta2;
  double eps;
  double weight_decay;
  double dampening;      // SGD
  double nesterov;       // SGD: 0 or 1
  double maximize;       // 0 or 1
  double decay_at_base;  // decoupled decay: 1 acts at lr, 0 at the replica's lr * rho
};
constexpr int kCallSettings = sizeof(CallSettings) / sizeof(double);
constexpr int kGroupSettings = sizeof(GroupSettings) / sizeof(double);

// What all replicas of a tensor share. 48 bytes: three 16-byte loads.
struct alignas(16) HyperRow {
  float gradient_scale;  // sign, unscaling and clipping in one factor
  float beta1;
  float lerp1;  // 1 - beta1; SGD: 1 - dampening, and 1 in the first step
  float beta2;
  float lerp2;                 // 1 - beta2
  float inv_sqrt_correction2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float coupled_decay;  // coupled rules: what of the parameter is added to the gradient
  float nesterov;
  uint32_t step;  // from 1; part of the key of random numbers
  float unused[2];
};
static_assert(sizeof(HyperRow) == 48);

// What each replica of a tensor has for itself.
struct alignas(8) ReplicaRow {
  float step_size;  // lr * rho; AdamW and Adam: lr * rho / (1 - beta1^step)
  float decay;      // 1 - lr * (rho or 1) * weight_decay; coupled rules: 1
};

// What the whole step shares, left in device memory for the host to read if it wants to.
struct alignas(16) Control {
  float skip;            // 1: gradients are not finite; parameters, moments and step counters stay as they are
  float norm;            // global norm of the unscaled gradients, 0 where none was asked for
  float gradient_scale;  // unscaling times clipping
  float unused;
};
static_assert(sizeof(Control) == 16);

// base^exponent by squaring: multiplications alone, so that host and device give the same bits.
HDET_HD double power(double base, uint32_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1u) result *= base;
    base *= base;
  }
  return result;
}

// `scale` is the gradient scaler's factor (the gradients are that many times too large), 1 without one; `found_inf` is its verdict;
// `sum_of_squares` is of the gradients as they are in memory, and is read where a norm is asked for.
HDET_HD Control derive_control(const CallSettings& settings, float scale, float found_inf, double sum_of_squares) {
  const double inverse = 1.0 / static_cast<double>(scale);
  double norm = 0.0, clip = 1.0;
  bool skip = found_inf != 0.0f;
  if (settings.max_norm != 0.0) {
    norm = square_root(sum_of_squares) * inverse;
    skip = skip || !(norm - norm == 0.0);  // NaN or infinite
    clip = settings.max_norm / (norm + 1e-6);  // as torch.nn.utils.clip_grad_norm_
    if (!(clip < 1.0)) clip = 1.0;
  }
  return {skip ? 1.0f : 0.0f, static_cast<float>(norm), static_cast<float>(inverse * clip), 0.0f};
}

// Is the decay part of the gradient, so that the direction depends on the parameter and replicas cannot share it? Decoupled decay is
// part of the step. A switch: a rule that is left out does not compile.
HDET_HD constexpr bool is_coupled(Rule rule) {
  switch (rule) {
    case Rule::adam:
    case Rule::sgd: return true;
    case Rule::adamw:
    case Rule::lion: break;
  }
  return false;
}

// Everything derived is derived here, in double, and rounded once. `step` counts from 1.
HDET_HD HyperRow derive_row(Rule rule, const GroupSettings& s, uint32_t step, float gradient_scale) {
  HyperRow row{};
  row.gradient_scale = s.maximize != 0.0 ? -gradient_scale : gradient_scale;
  row.beta1 = static_cast<float>(s.beta1);
  row.lerp1 = static_cast<float>(1.0 - s.beta1);
  row.beta2 = static_cast<float>(s.beta2);
  row.lerp2 = static_cast<float>(1.0 - s.beta2);
  row.inv_sqrt_correction2 = 1.0f;
  row.eps = static_cast<float>(s.eps);
  row.nesterov = s.nesterov != 0.0 ? 1.0f : 0.0f;
  row.step = step;
  const bool adam = rule == Rule::adamw || rule == Rule::adam;
  if (adam) row.inv_sqrt_correction2 = static_cast<float>(1.0 / square_root(1.0 - power(s.beta2, step)));
  if (is_coupled(rule)) row.coupled_decay = static_cast<float>(s.weight_decay);
  // torch fills the momentum buffer with the first gradient as it is, and without momentum has no buffer to dampen
  if (rule == Rule::sgd) row.lerp1 = step <= 1 || s.beta1 == 0.0 ? 1.0f : static_cast<float>(1.0 - s.dampening);
  return row;
}

// 1 - rate * weight_decay for decoupled rules; 1 for coupled ones.
HDET_HD double derive_decay(Rule rule, const GroupSettings& s, double rate) {
  return 1.0 - (is_coupled(rule) ? 0.0 : rate * s.weight_decay);  // as a choice of two results it spills registers on sm_80 and sm_90
}

// What a replica's rate is divided by.
HDET_HD double derive_correction1(Rule rule, const GroupSettings& s, uint32_t step) {
  return rule == Rule::adamw || rule == Rule::adam ? 1.0 - power(s.beta1, step) : 1.0;
}

HDET_HD ReplicaRow derive_replica(Rule rule, const GroupSettings& s, double lr, double rho, double correction1) {
  const double rate = lr * rho;  // Eq. 2
  return {static_cast<float>(rate / correction1), static_cast<float>(derive_decay(rule, s, s.decay_at_base != 0.0 ? lr : rate))};
}

}  // namespace hdet
