// The derive phase of a step: from the host's settings, the norm, the scaler and the step counters
// to what the update reads. Control comes first, then each tensor for itself, its counter included:
// a loop on a CPU, a thread for each tensor on a GPU.
#pragma once

#include "plan.h"

namespace hdet {

// Where a plan's settings lie: see hyper.h.
HDET_HD const GroupSettings& group_settings(const StepPlan& plan, int32_t group) {
  return reinterpret_cast<const GroupSettings*>(plan.settings + kCallSettings)[group];
}
HDET_HD const double* rho_settings(const StepPlan& plan, int32_t group) {
  return plan.settings + kCallSettings + int64_t{kGroupSettings} * plan.num_groups +
         int64_t{group} * plan.num_replicas;
}

// Everything derived is derived in double, and rounded once. `step` counts from 1.
HDET_HD HyperRow derive_row(Rule rule, const GroupSettings& s, uint32_t step, double rate,
                            float gradient_scale) {
  HyperRow row{};
  row.gradient_scale = s.maximize != 0.0 ? -gradient_scale : gradient_scale;
  row.step = step;
  derive_scalars(rule, s, step, rate, {}, row.s);
  return row;
}

// 1 - rate * weight_decay for decoupled rules; 1 for coupled ones.
HDET_HD double derive_decay(Rule rule, const GroupSettings& s, double rate) {
  // as a choice of two results it spills registers on sm_80 and sm_90
  return 1.0 - (is_coupled(rule) ? 0.0 : rate * s.weight_decay);
}

HDET_HD ReplicaRow derive_replica(Rule rule, const GroupSettings& s, double lr, double rho,
                                  double divisor) {
  const double rate = lr * rho;  // Eq. 2
  const auto decay = static_cast<float>(derive_decay(rule, s, s.decay_at_base != 0.0 ? lr : rate));
  const auto step_size = static_cast<float>(rate / divisor);
  return {s.cautious_decay != 0.0 ? -step_size : step_size, decay};
}

// 0 where the rule leaves the step out: nor does the parameter decay.
HDET_HD double rate_of(const StepPlan& plan, int32_t group, uint32_t step) {
  if (step < first_step(plan.rule)) return 0.0;
  const bool on_device = plan.rates != nullptr && plan.rates[group] != nullptr;
  return on_device ? static_cast<double>(*plan.rates[group]) : group_settings(plan, group).lr;
}

HDET_HD Control prepare_control(const StepPlan& plan, double sum_of_squares) {
  const float scale = plan.grad_scale != nullptr ? *plan.grad_scale : 1.0f;
  const float found_inf = plan.found_inf != nullptr ? *plan.found_inf : 0.0f;
  return derive_control(*reinterpret_cast<const CallSettings*>(plan.settings), scale, found_inf,
                        sum_of_squares);
}

// Of the averages over time, which count for themselves: they may begin later than the tensor.
HDET_HD void prepare_emas(const StepPlan& plan, const Control& control, int64_t tensor) {
  auto* const counter =
      static_cast<float*>(emas_of(plan, tensor)[plan.num_emas * plan.num_replicas]);
  const uint32_t step = static_cast<uint32_t>(*counter) + 1u;
  HDET_ROLLED
  for (int32_t j = 0; j < plan.num_emas; ++j)
    ema_row_of(plan, tensor, j) = derive_ema(plan.ema_settings[j], step);
  if (control.skip == 0.0f) *counter += 1.0f;
}

// All that the chunks of this tensor read, and its counter. `before`: the tensor that was prepared
// before it in this step, if one was; else -1. Where both have the same group and count, its rows
// serve again. Returns the tensor, or `before` where it has no gradient.
HDET_HD int64_t prepare_tensor(const StepPlan& plan, const Control& control, int64_t tensor,
                               int64_t before) {
  if (plan.gradients[tensor] == nullptr) return before;
  float* const counter = counter_of(plan, tensor);
  const int32_t group = plan.groups[tensor];
  const uint32_t step = static_cast<uint32_t>(*counter) + 1u;  // the one to be taken, from 1
  const bool alike = before >= 0 && plan.groups[before] == group && plan.rows[before].step == step;
  const GroupSettings& s = group_settings(plan, group);
  const double lr = rate_of(plan, group, step), rate = lr * rho_settings(plan, group)[0];
  plan.rows[tensor] =
      alike ? plan.rows[before] : derive_row(plan.rule, s, step, rate, control.gradient_scale);
  ReplicaRow* const rows = plan.replica_rows + tensor * plan.num_replicas;
  const double divisor = alike ? 1.0 : derive_divisor(plan.rule, s, step);
  HDET_ROLLED
  for (int32_t k = 0; k < plan.num_replicas; ++k) {
    rows[k] = alike ? plan.replica_rows[before * plan.num_replicas + k]
                    : derive_replica(plan.rule, s, lr, rho_settings(plan, group)[k], divisor);
  }
  if (control.skip == 0.0f) *counter += 1.0f;
  if (plan.emas != nullptr) prepare_emas(plan, control, tensor);
  return tensor;
}

// A tensor's sums, of its first chunk and those that follow it, and how many chunks it has.
HDET_HD const double* sums_of(const StepPlan& plan, int64_t tensor) {
  return plan.sums + plan.spans[2 * tensor] * plan.num_sums;
}
HDET_HD int64_t num_chunks_of(const StepPlan& plan, int64_t tensor) {
  return (plan.spans[2 * tensor + 1] + plan.longest - 1) / plan.longest;
}

// After the sums over a tensor that has elements and a gradient: what depends on them.
HDET_HD void prepare_again(const StepPlan& plan, int64_t tensor, Whole& whole) {
  whole.elements = static_cast<double>(plan.spans[2 * tensor + 1]);
  const int32_t group = plan.groups[tensor];
  HyperRow& row = plan.rows[tensor];
  const double rate = rate_of(plan, group, row.step) * rho_settings(plan, group)[0];
  derive_scalars(plan.rule, group_settings(plan, group), row.step, rate, whole, row.s);
}

}  // namespace hdet
