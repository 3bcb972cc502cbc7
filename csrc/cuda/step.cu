// An optimizer step on a GPU: norm (where one is asked for), derive, update.
#include "kernels.h"
#include "launch.cuh"
#include "phases.cuh"
#include "step.cuh"

namespace hdet::cuda {
namespace {

using Kernel = void (*)(StepPlan);

template <class Rule>
Kernel kernel_for(bool many, bool all_float) {
  if (many) return all_float ? step_kernel<Rule, true, true> : step_kernel<Rule, true, false>;
  return all_float ? step_kernel<Rule, false, true> : step_kernel<Rule, false, false>;
}

Kernel kernel_for(Rule rule, bool many, bool all_float) {
  switch (rule) {
    case Rule::adam: return kernel_for<AdamRule>(many, all_float);
    case Rule::sgd: return kernel_for<SgdRule>(many, all_float);
    case Rule::lion: return kernel_for<LionRule>(many, all_float);
    case Rule::adamw: break;
  }
  return kernel_for<AdamWRule>(many, all_float);
}

}  // namespace

void step(const StepPlan& plan, int device, std::uintptr_t stream) {
  const char* const name = "cudaLaunchKernelEx(step)";
  const bool many = plan.num_replicas > 1;
  const auto shared = static_cast<int64_t>(many ? plan.num_replicas * sizeof(Replica) : 0);
  const Grid grid{plan.num_chunks, kStepThreads, shared};
  check(grid, name);
  use_device(device);
  if (plan.partials != nullptr) launch_norm(plan.chunks, plan.num_chunks, plan.gradients, plan.partials, stream);
  launch_derive(plan, stream);
  if (plan.codebooks != nullptr) launch_coded(plan, grid, stream);
  else launch(name, kernel_for(plan.rule, many, plan.all_float != 0), grid, stream, plan);
}

}  // namespace hdet::cuda
