// The plan of a multi-tensor operation: a list of chunks and tables of addresses, in memory of the
// device that runs it.
//
// A chunk is the unit of work of one thread block, or of several that share it, and of one turn of
// a CPU loop. Offsets of 64 bits appear only here; inside a chunk an index is an int. An empty
// tensor has no chunk, wherever it stands in the list.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "eight_bit.h"
#include "numbers.h"
#include "rules.h"  // printed by csrc/generate.py into the build folder

namespace hdet {

constexpr int kGroupSettings = sizeof(GroupSettings) / sizeof(double);

struct alignas(16) Chunk {
  int64_t offset;  // elements from the start of its tensor
  int64_t begin;  // elements in all chunks before this one: where the threads of a CPU cut the list
  int32_t tensor;   // column of the address tables, row of the hyperparameters
  int32_t length;   // elements, from 1 on: whole blocks of codes, but for the last chunk's
  int64_t formats;  // how the tensor's streams are stored: numbers.h
};
static_assert(sizeof(Chunk) == 32);  // hdet/kernels/tables.py writes them

// An optimizer step. All pointers are addresses on the device that runs it; tables are indexed by
// Chunk::tensor. Three phases: norm (where partials is set), derive, update. A rule that asks for
// sums over a tensor has two more before the update: sums, and what of the rows depends on them.
struct StepPlan {
  const Chunk* chunks;
  int64_t num_chunks;
  int32_t longest;  // elements of the longest chunk
  int64_t num_tensors;
  int32_t num_replicas;
  int32_t num_groups;
  Rule rule;
  int32_t zero_gradients;  // 1: the gradients are zeros afterwards, also where the step was skipped
  Known known;             // of all tensors: the loops need not ask
  uint64_t seed;           // of stochastic rounding
  int32_t first_replica;   // number of the plan's first replica, for random numbers

  // addresses
  void* const* gradients;     // [tensor]; null: none in this step, which leaves the tensor alone
  void* const* addresses;     // [tensor][columns]: see param_of() and those that follow it
  int32_t columns;            // 2 * (replicas + moments) + 1
  const Codebook* codebooks;  // signed, unsigned; null where no tensor has codes
  const int32_t* ids;         // [tensor] for random numbers
  const int32_t* groups;      // [tensor] whose settings it has
  const float* const* rates;  // [group] in device memory, or null: GroupSettings::lr

  // averages of the weights over time, float32; null: there are none
  void* const* emas;  // [tensor][average][replica], then the count of steps they have seen
  int32_t num_emas;
  const EmaSettings* ema_settings;  // [average]
  EmaRow* ema_rows;                 // [tensor][average]

  // from the host, and derived from it
  double* settings;          // hyper.h, rules.h; the rates' addresses may follow
  HyperRow* rows;            // [tensor]
  ReplicaRow* replica_rows;  // [tensor][replica]
  Control* control;
  double* partials;         // [chunk] sums of squares; null: no norm
  double* sums;             // [chunk][num_sums], what a rule sums over a tensor
  int32_t num_sums;         // 0: nothing
  const int64_t* spans;     // [tensor]: the number of its first chunk, and its elements
  const float* grad_scale;  // torch's GradScaler, or null
  const float* found_inf;   // or null

  // Settings that a GPU's derive phase brings along as an argument and writes to `settings`, where
  // no copy has: num_carried words of 8 bytes in host memory.
  const uint64_t* carried;
  int32_t num_carried;
};
constexpr int kCarried = 192;  // at most: 1.5 KiB of a kernel's arguments

// A row of a step's addresses: parameters and masters of the replicas, moments and the scales of
// those that are codes, torch's step counter. What a tensor has not is null.
HDET_HD void* const* row_of(const StepPlan& plan, int64_t tensor) {
  return plan.addresses + tensor * plan.columns;
}
HDET_HD void* param_of(const StepPlan& plan, int64_t tensor, int32_t replica) {
  return row_of(plan, tensor)[replica];
}
HDET_HD void* master_of(const StepPlan& plan, int64_t tensor, int32_t replica) {
  return row_of(plan, tensor)[plan.num_replicas + replica];
}
HDET_HD void* moment_of(const StepPlan& plan, int64_t tensor, int32_t moment) {
  return row_of(plan, tensor)[2 * plan.num_replicas + moment];
}
HDET_HD float* scales_of(const StepPlan& plan, int64_t tensor, int32_t moment) {
  return static_cast<float*>(row_of(plan, tensor)[plan.num_replicas + plan.columns / 2 + moment]);
}
HDET_HD float* counter_of(const StepPlan& plan, int64_t tensor) {
  return static_cast<float*>(row_of(plan, tensor)[plan.columns - 1]);
}

HDET_HD void* const* emas_of(const StepPlan& plan, int64_t tensor) {
  return plan.emas + tensor * (plan.num_emas * plan.num_replicas + 1);
}
HDET_HD float* ema_of(const StepPlan& plan, int64_t tensor, int32_t average, int32_t replica) {
  return static_cast<float*>(emas_of(plan, tensor)[average * plan.num_replicas + replica]);
}
HDET_HD EmaRow& ema_row_of(const StepPlan& plan, int64_t tensor, int32_t average) {
  return plan.ema_rows[tensor * plan.num_emas + average];
}

// The weighted mean of K co-resident replicas, in place (Eq. 3).
struct AveragePlan {
  const Chunk* chunks;
  int64_t num_chunks;
  int32_t num_replicas;
  int32_t all_float;
  void* const* addresses;  // [tensor][params, masters][replica]; where there are masters, the mean
                           // is of these
  const float* weights;    // [replica], summing to 1; one of weight 0 is not read, but written
};

// destination = scale * source, for two sets of tensors that do not overlap: into a communication
// bucket and out of it. Scale 0 writes zeros without reading, as NaN times zero would be NaN.
// Formats::gradient is the type of the source, Formats::param and Formats::master are those of the
// destination. From a set that has masters one copies those; to a set that has masters both are
// written.
struct CopyPlan {
  const Chunk* chunks;
  int64_t num_chunks;
  int32_t all_float;
  // [tensor][4]: source; its lower half in the split form, or null; destination; its master
  void* const* addresses;
  float scale;
};

// In a split form, or none: others are the source themselves.
HDET_HD constexpr Master source_master(const Formats& f) {
  return static_cast<Master>(f.moments[0]);
}

}  // namespace hdet
