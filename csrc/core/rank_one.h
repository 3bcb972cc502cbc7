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
  double* const* scales;        // [tensor] A, which stays from step to step
  ReplicaRow* lines;            // [tensor] of a step: its step_size and decay; of a converge: {rho_mean, A}
  const double* mean_rho;       // [group] the multiplier of the replicas' mean, for a converge
};

// Called by prepare_tensor, in the place of that of prepare.h.
HDET_HD void prepare_replicas(const RankOnePlan& plan, const Control& control, const Prepared& at) {
  const GroupSettings& s = group_settings(plan, at.group);
  double& scale = *plan.scales[at.tensor];
  ReplicaRow& line = plan.lines[at.tensor];
  const double lr = rate_of(plan, at.group);
  line = at.like < 0 ? derive_replica(plan.rule, s, lr, 1.0, derive_correction1(plan.rule, s, at.step)) : plan.lines[at.like];
  const double decay = control.skip != 0.0f ? 1.0 : derive_decay(plan.rule, s, lr);
  line.decay = static_cast<float>(decay);
  scale *= decay;
  for (int32_t k = 0; k < plan.num_replicas; ++k) {
    plan.replica_rows[at.tensor * plan.num_replicas + k] = {static_cast<float>(rho_settings(plan, at.group)[k]), static_cast<float>(scale)};
  }
}

// The derive phase of a converge: the replicas' mean becomes base and outputs; D = 0 and A = 1.
HDET_HD void prepare_converge(const RankOnePlan& plan, int64_t tensor) {
  plan.lines[tensor] = {static_cast<float>(plan.mean_rho[plan.groups[tensor]]), static_cast<float>(*plan.scales[tensor])};
  *plan.scales[tensor] = 1.0;
}

// One element of D after a step. `direction` is 0 where the step is skipped.
HDET_HD float displaced(const ReplicaRow& line, float displacement, float direction) {
  return line.decay * displacement + line.step_size * direction;
}

}  // namespace hdet
