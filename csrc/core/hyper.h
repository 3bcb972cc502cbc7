// Hyperparameters: what the host writes (doubles), and what the kernels read (fp32 rows), derived
// on the device that runs the step. What depends on the rules is in rules.h: GroupSettings,
// HyperRow.
//
// A kernel reads its row from memory, so changing a rate, a multiplier or a beta never changes a
// kernel's arguments: one small copy into the settings, and the next step (or the next replay of a
// captured one) acts on it.
#pragma once

#include "portable.h"

namespace hdet {

// One array of doubles, in this order: CallSettings, GroupSettings[groups] (rules.h),
// rho[groups][replicas] (Eq. 1). Of the whole call.
struct CallSettings {
  double max_norm;  // clip gradients to this global norm; infinity only measures it; 0: no norm
};

constexpr int kCallSettings = sizeof(CallSettings) / sizeof(double);

// What each replica of a tensor has for itself.
struct alignas(8) ReplicaRow {
  // lr * rho, divided by the rule's divisor; its sign bit is set where decay is cautious: two
  // registers, as a third one spills
  float step_size;
  float decay;  // 1 - lr * (rho or 1) * weight_decay; coupled rules: 1
};
static_assert(sizeof(ReplicaRow) == 8);  // as hdet/kernels/step.py has it, like Control

// How an average of the weights over time moves: hdet/kernels/ema.py, which explains it.
struct EmaSettings {
  double decay;  // negative: a mean in which update n counts as n^power
  double power, warm_up, every, begin;
};

// Of one step and one average. Weight 0: it is left alone; 1: it becomes the parameter.
struct alignas(8) EmaRow {
  float weight, rest;  // 1 - weight
};

// What the whole step shares, left in device memory for the host to read if it wants to.
struct alignas(16) Control {
  float skip;            // 1: gradients are not finite; parameters, moments and counters stay
  float norm;            // global norm of the unscaled gradients, 0 where none was asked for
  float gradient_scale;  // unscaling times clipping
  float unscaling;       // 1 / the scaler's factor
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

// e^x for x that are not positive: of x / 1024 as a series, squared ten times. It is e^x - 1 that
// is summed and squared, as 1 - e^x is asked for where that is small.
HDET_HD double exponential(double x) {
  const double y = (x > -700.0 ? x : -700.0) * 0x1p-10;
  double less_one = 0.0;
  for (int n = 10; n >= 1; --n) less_one = y * (1.0 / n) * (1.0 + less_one);
  for (int i = 0; i < 10; ++i) less_one *= 2.0 + less_one;
  return 1.0 + less_one;
}

// ln x for x from 0 to 1, of 0 a number near -18: ln of the fourth root as a series.
HDET_HD double logarithm(double x) {
  const double root = square_root(square_root(x));
  const double s = (root - 1.0) / (root + 1.0);
  double sum = 0.0;
  for (int n = 23; n >= 1; n -= 2) sum = 1.0 / n + s * s * sum;
  return 8.0 * s * sum;
}

// `step`: of those that the average has seen, from 1.
HDET_HD EmaRow derive_ema(const EmaSettings& s, uint32_t step) {
  const uint32_t begin = static_cast<uint32_t>(s.begin), every = static_cast<uint32_t>(s.every);
  if (step <= begin) return {1.0f, 0.0f};
  if ((step - begin) % every != 0) return {0.0f, 1.0f};
  const double n = (step - begin) / every;  // of updates, from 1
  double kept = s.decay;
  if (n == 1.0) kept = 0.0;
  else if (s.decay < 0.0) kept = exponential((s.power + 1.0) * logarithm((n - 1.0) / n));
  else if (s.warm_up != 0.0 && n / (n + 9.0) < s.decay) kept = n / (n + 9.0);
  return {static_cast<float>(1.0 - kept), static_cast<float>(kept)};
}

// `scale` is the gradient scaler's factor (the gradients are that many times too large), 1 without
// one; `found_inf` is its verdict; `sum_of_squares` is of the gradients as they are in memory, and
// is read where a norm is asked for.
HDET_HD Control derive_control(const CallSettings& settings, float scale, float found_inf,
                               double sum_of_squares) {
  const double inverse = 1.0 / static_cast<double>(scale);
  double norm = 0.0, clip = 1.0;
  bool skip = found_inf != 0.0f;
  if (settings.max_norm != 0.0) {
    norm = square_root(sum_of_squares) * inverse;
    skip = skip || !(norm - norm == 0.0);      // NaN or infinite
    clip = settings.max_norm / (norm + 1e-6);  // as torch.nn.utils.clip_grad_norm_
    if (!(clip < 1.0)) clip = 1.0;
  }
  return {skip ? 1.0f : 0.0f, static_cast<float>(norm), static_cast<float>(inverse * clip),
          static_cast<float>(inverse)};
}

}  // namespace hdet
