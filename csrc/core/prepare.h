// The derive phase of a step: from the host's settings, the norm, the scaler and the step counters to what the update reads. The
// CPU runs it as loops, CUDA in one block: control first, then all rows and replicas, and then, once no row is left that still has
// to read its counter, the counters.
#pragma once

#include "hyper.h"
#include "plan.h"

namespace hdet {

// Where a plan's settings lie: see hyper.h.
HDET_HD const RowSettings* row_settings(const StepPlan& plan) {
  return reinterpret_cast<const RowSettings*>(plan.settings + kCallSettings);
}
HDET_HD const double* rho_settings(const StepPlan& plan) { return plan.settings + kCallSettings + int64_t{kRowSettings} * plan.num_rows; }

HDET_HD Control prepare_control(const StepPlan& plan, double sum_of_squares) {
  const float scale = plan.grad_scale != nullptr ? *plan.grad_scale : 1.0f;
  const float found_inf = plan.found_inf != nullptr ? *plan.found_inf : 0.0f;
  return derive_control(*reinterpret_cast<const CallSettings*>(plan.settings), scale, found_inf, sum_of_squares);
}

// The number of the step that is about to be taken, from 1.
HDET_HD uint32_t step_of_row(const StepPlan& plan, int32_t row) { return static_cast<uint32_t>(*plan.counters[plan.leaders[row]]) + 1u; }

HDET_HD double rate_of_row(const StepPlan& plan, int32_t row) {
  const bool on_device = plan.rates != nullptr && plan.rates[row] != nullptr;
  return on_device ? static_cast<double>(*plan.rates[row]) : row_settings(plan)[row].lr;
}

HDET_HD void prepare_row(const StepPlan& plan, const Control& control, int32_t row) {
  plan.rows[row] = derive_row(plan.rule, row_settings(plan)[row], step_of_row(plan, row), control.gradient_scale);
}

HDET_HD void prepare_replica(const StepPlan& plan, int32_t row, int32_t replica) {
  const RowSettings& settings = row_settings(plan)[row];
  const double lr = rate_of_row(plan, row);
  const int64_t place = static_cast<int64_t>(row) * plan.num_replicas + replica;
  plan.replica_rows[place] = derive_replica(plan.rule, settings, lr, rho_settings(plan)[place], step_of_row(plan, row));
}

// Only where Control::skip is 0, and after every row has been prepared.
HDET_HD void count_step(const StepPlan& plan, int64_t tensor) { *plan.counters[tensor] += 1.0f; }

}  // namespace hdet
