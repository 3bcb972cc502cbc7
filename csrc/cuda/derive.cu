// The derive phase on a GPU, in one block: what the update reads, from the host's settings, the norm, the scaler and the step
// counters. The counters themselves advance in the update (step.cu), which reads none: there all multiprocessors share the work.
#include "../core/prepare.h"
#include "block.cuh"
#include "launch.cuh"
#include "phases.cuh"

namespace hdet::cuda {
namespace {

constexpr int kDeriveThreads = 512;

__global__ void __launch_bounds__(kDeriveThreads) derive_kernel(const __grid_constant__ StepPlan plan) {
  __shared__ double sums[kDeriveThreads];
  if (plan.partials != nullptr) {
    phase([&](int thread) {
      // Four sums of a thread: a 7B model has 100 000 partials, and one load at a time would wait 200 times for the cache.
      double sum[4] = {};
      int64_t i = thread;
      for (; i + 3 * kDeriveThreads < plan.num_chunks; i += 4 * kDeriveThreads) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += plan.partials[i + j * kDeriveThreads];
      }
      for (; i < plan.num_chunks; i += kDeriveThreads) sum[0] += plan.partials[i];
      sums[thread] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    });
    add_up<kDeriveThreads>(sums);
  }
  threads([&](int thread) {
    const Control control = prepare_control(plan, plan.partials != nullptr ? sums[0] : 0.0);
    if (thread == 0) *plan.control = control;
    for (int row = thread; row < plan.num_rows; row += kDeriveThreads) prepare_row(plan, control, row);
    // from the other end of the block, so that rows and replicas are derived side by side
    const int64_t pairs = static_cast<int64_t>(plan.num_rows) * plan.num_replicas;
    for (int64_t i = kDeriveThreads - 1 - thread; i < pairs; i += kDeriveThreads) {
      prepare_replica(plan, static_cast<int32_t>(i / plan.num_replicas), static_cast<int32_t>(i % plan.num_replicas));
    }
    for (int k = thread; k < plan.num_replicas; k += kDeriveThreads) prepare_weight(plan, k);
  });
}

}  // namespace

void launch_derive(const StepPlan& plan, std::uintptr_t stream) {
  launch("cudaLaunchKernelEx(derive)", derive_kernel, {1, kDeriveThreads}, stream, plan);
}

}  // namespace hdet::cuda
