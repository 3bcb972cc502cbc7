// An optimizer step on a GPU: norm (where one is asked for), derive, update.
#include "kernels.h"
#include "launch.cuh"
#include "phases.cuh"
#include "step.cuh"

namespace hdet::cuda {
namespace {

using Kernel = void (*)(StepPlan, Slices);

template <class Rule, bool kMany>
Kernel kernel_for(Known known) {
  switch (known) {
    case Known::floats:
      return step_kernel<Rule, kMany, Known::floats>;
    case Known::masters:
      return step_kernel<Rule, kMany, Known::masters>;
    case Known::split:
      return step_kernel<Rule, kMany, Known::split>;
    case Known::halves:
      if constexpr (!kMany) return step_kernel<Rule, false, Known::halves>;
      break;
    case Known::none:
      break;
  }
  return step_kernel<Rule, kMany, Known::none>;
}

template <class Rule>
Kernel kernel_for(const StepPlan& plan) {
  return plan.num_replicas > 1 ? kernel_for<Rule, true>(plan.known)
                               : kernel_for<Rule, false>(plan.known);
}

Kernel kernel_for(const StepPlan& plan) {
  return with_rule(plan.rule, [&](auto rule) { return kernel_for<decltype(rule)>(plan); });
}

}  // namespace

void step(const StepPlan& plan, int device, std::uintptr_t stream) {
  const char* const name = "cudaLaunchKernelEx(step)";
  const auto shared =
      static_cast<int64_t>(plan.num_replicas > 1 ? plan.num_replicas * sizeof(Replica) : 0);
  // A block of several replicas, or of codes, first fills shared memory: it has a whole chunk.
  const bool fills = plan.num_replicas > 1 || plan.codebooks != nullptr;
  const Slices slices = fills ? whole_chunks(plan.longest) : slices_of(plan.longest);
  const Grid grid{plan.num_chunks * slices.count, kStepThreads, shared, true};
  check(grid, name);
  use_device(device);
  if (plan.partials != nullptr)
    launch_norm(plan.chunks, plan.num_chunks, plan.gradients, plan.partials, stream);
  launch_derive(plan, stream);
  if (plan.codebooks != nullptr)
    launch_coded(plan, grid, stream);
  else
    launch(name, kernel_for(plan), grid, stream, plan, slices);
}

}  // namespace hdet::cuda
