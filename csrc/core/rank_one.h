// K replicas on one line: with shared gradients and moments, and decay at the base rate, replica k is at A * base - rho_k * D, so a
// base and one displacement D say where all of them are (rank one). A step moves D and A; a converge moves the base.
//
//   D' = decay * D + step_size * u,   A' = A * decay,   output_k = A' * base - rho_k * D'
//
// A lives in device memory, so a captured step replays right.
#pragma once

#include "prepare.h"
#include "rules.h"

namespace hdet {

// A step plan whose params are the outputs, which it only writes. Its replica_rows hold {rho_k, A'}, so that
// output_k = take_step(replica, base, D'). No masters.
struct RankOnePlan : StepPlan {
  float* const* bases;          // [tensor]
  float* const* displacements;  // [tensor] D
  double* scales;               // [row] A, which stays from step to step
  ReplicaRow* lines;            // [row] of a step: its step_size and decay; of a converge: {rho_mean, A}
  const double* mean_rho;       // [row] the multiplier of the replicas' mean, for a converge
};

// The derive phase of a step, after prepare_row: one row with all its replicas.
HDET_HD void prepare_rank_one(const RankOnePlan& plan, const Control& control, int32_t row) {
  const RowSettings& settings = row_settings(plan)[row];
  const double lr = rate_of_row(plan, row);
  const double decay = control.skip != 0.0f ? 1.0 : derive_decay(plan.rule, settings, lr);
  plan.lines[row] = {derive_replica(plan.rule, settings, lr, 1.0, step_of_row(plan, row)).step_size, static_cast<float>(decay)};
  plan.scales[row] *= decay;
  for (int32_t k = 0; k < plan.num_replicas; ++k) {
    const int64_t place = static_cast<int64_t>(row) * plan.num_replicas + k;
    plan.replica_rows[place] = {static_cast<float>(rho_settings(plan)[place]), static_cast<float>(plan.scales[row])};
  }
}

// The derive phase of a converge: the replicas' mean becomes base and outputs; D = 0 and A = 1.
HDET_HD void prepare_converge(const RankOnePlan& plan, int32_t row) {
  plan.lines[row] = {static_cast<float>(plan.mean_rho[row]), static_cast<float>(plan.scales[row])};
  plan.scales[row] = 1.0;
}

// One element of D after a step. `direction` is 0 where the step is skipped.
HDET_HD float displaced(const ReplicaRow& line, float displacement, float direction) {
  return line.decay * displacement + line.step_size * direction;
}

}  // namespace hdet
