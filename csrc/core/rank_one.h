// K replicas on one line: with shared gradients and moments, and decay at the base rate, replica k is at A * base - rho_k * D, so a
// base and one displacement D say where all of them are (rank one). A step moves D and A; a mean of the replicas changes scalars.
//
//   D' = decay * D + step_size * u,   A' = A * decay,   output_k = A' * base - rho_k * D'
//
// After a mean all outputs are A * base - rho_mean * D. That point becomes the base of the next step, in the pass that the step
// makes anyway: the fold. A and the pending fold live in device memory, so a captured step replays right.
#pragma once

#include "prepare.h"
#include "rules.h"

namespace hdet {

// What stays from step to step, for each row. Starts as {1, 0, 0}.
struct alignas(16) RankOneState {
  double scale;    // A
  float fold_rho;  // rho_mean of the last mean
  float pending;   // 1: the outputs are a mean, and the next step folds it into the base
};
static_assert(sizeof(RankOneState) == 16);

// What an update reads, for each row.
struct alignas(16) RankOneRow {
  ReplicaRow fold;  // base' = take_step(fold, base, D), if folds
  float folds;      // 1: with base written and D taken as 0
  float decay;
  float step_size;
  float unused[3];
};
static_assert(sizeof(RankOneRow) == 32);

// A step plan whose params are the outputs, which it only writes, with Finish::store or Finish::mean. Its replica_rows hold
// {rho_k, A'}, so that output_k = take_step(replica, base, D'). No masters, averages or buckets.
struct RankOnePlan : StepPlan {
  float* const* bases;          // [tensor]
  float* const* displacements;  // [tensor] D
  RankOneState* states;         // [row]
  RankOneRow* lines;            // [row]
};

HDET_HD double mean_rho(const RankOnePlan& plan, int32_t row) {
  const double* const rho = rho_settings(plan) + static_cast<int64_t>(row) * plan.num_replicas;
  double sum = 0.0;
  for (int32_t k = 0; k < plan.num_replicas; ++k) sum += weight_settings(plan)[k] * rho[k];
  return sum;
}

// The derive phase of a step, after prepare_row: one row with all its replicas.
HDET_HD void prepare_rank_one(const RankOnePlan& plan, const Control& control, int32_t row) {
  const RowSettings& settings = row_settings(plan)[row];
  const double lr = rate_of_row(plan, row);
  const bool skip = control.skip != 0.0f, mean = plan.finish == Finish::mean;
  RankOneState& state = plan.states[row];
  RankOneRow& line = plan.lines[row];
  line.fold = {state.fold_rho, static_cast<float>(state.scale)};
  line.folds = state.pending;
  if (state.pending != 0.0f) state.scale = 1.0;
  const double decay = skip ? 1.0 : derive_decay(plan.rule, settings, lr);
  line.decay = static_cast<float>(decay);
  line.step_size = derive_replica(plan.rule, settings, lr, 1.0, step_of_row(plan, row)).step_size;
  state.scale *= decay;
  const double rho_mean = mean_rho(plan, row);
  state.fold_rho = static_cast<float>(rho_mean);
  state.pending = mean ? 1.0f : 0.0f;
  for (int32_t k = 0; k < plan.num_replicas; ++k) {
    const int64_t place = static_cast<int64_t>(row) * plan.num_replicas + k;
    plan.replica_rows[place] = {static_cast<float>(mean ? rho_mean : rho_settings(plan)[place]), static_cast<float>(state.scale)};
  }
}

// The derive phase of a converge: the replicas' mean, or the pending one, becomes base and outputs; D = 0 and A = 1.
HDET_HD void prepare_converge(const RankOnePlan& plan, int32_t row) {
  RankOneState& state = plan.states[row];
  const float rho = state.pending != 0.0f ? state.fold_rho : static_cast<float>(mean_rho(plan, row));
  plan.lines[row] = {{rho, static_cast<float>(state.scale)}, 1.0f, 1.0f, 0.0f, {}};
  state = {1.0, 0.0f, 0.0f};
}

// One element of a step up to its outputs: base and D after it. `direction` is 0 where the step is skipped.
HDET_HD void move_on_line(const RankOneRow& line, float direction, float& base, float& displacement) {
  if (line.folds != 0.0f) {
    base = take_step(line.fold, base, displacement);
    displacement = 0.0f;
  }
  displacement = line.decay * displacement + line.step_size * direction;
}

}  // namespace hdet
