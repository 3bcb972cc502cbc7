// The hyperparameter table: one row of fp32 scalars per (parameter group, step). A kernel reads its row from memory, so changing
// a rate, a multiplier or a beta never changes a kernel's arguments.
#pragma once

#include <cmath>
#include <cstdint>

namespace hdet {

// What the optimizer knows, in double. `multiplier` is this replica's rho (Eq. 1); `step` counts from 1.
struct AdamWSettings {
  double lr;
  double multiplier;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double maximize;  // 0 or 1
  double step;
};

// What the kernels read. 48 bytes: three 16-byte loads.
struct alignas(16) HyperRow {
  float step_size;             // lr * multiplier / (1 - beta1^step)
  float decay;                 // 1 - lr * multiplier * weight_decay
  float beta1;
  float lerp1;                 // 1 - beta1, rounded once from double
  float beta2;
  float lerp2;                 // 1 - beta2
  float inv_sqrt_correction2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float sign;                  // -1 to maximize, else 1
  float unused[3];
};
static_assert(sizeof(HyperRow) == 48, "the Python side allocates rows of 48 bytes");

// Everything derived is derived here, in double, and rounded once.
inline HyperRow adamw_row(const AdamWSettings& s) {
  const double lr = s.lr * s.multiplier;  // Eq. 2: the replica's own rate, in the step and in the decay (as stock AdamW)
  const double correction1 = 1.0 - std::pow(s.beta1, s.step);
  const double correction2 = 1.0 - std::pow(s.beta2, s.step);
  HyperRow row{};
  row.step_size = static_cast<float>(lr / correction1);
  row.decay = static_cast<float>(1.0 - lr * s.weight_decay);
  row.beta1 = static_cast<float>(s.beta1);
  row.lerp1 = static_cast<float>(1.0 - s.beta1);
  row.beta2 = static_cast<float>(s.beta2);
  row.lerp2 = static_cast<float>(1.0 - s.beta2);
  row.inv_sqrt_correction2 = static_cast<float>(1.0 / std::sqrt(correction2));
  row.eps = static_cast<float>(s.eps);
  row.sign = s.maximize != 0.0 ? -1.0f : 1.0f;
  return row;
}

}  // namespace hdet
