// An optimizer step on a GPU: norm (where one is asked for), derive, sums (where the rule asks for
// some), update.
#include "kernels.h"
#include "launch.cuh"
#include "step.cuh"

namespace hdet::cuda {
namespace {

StepKernel find_kernel(const StepPlan& plan) {
  return with_rule(plan.rule, [&](auto rule) {
    using Own = decltype(rule);
    if constexpr (!Own::kGeneric) {
      if (is_usual<Own>(plan)) return kernel_for<Own>(plan);
    }
    return kernel_for<AnyRule>(plan);
  });
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
  if (plan.partials != nullptr) launch_norm(plan, stream);
  launch_derive(plan, stream);
  if (plan.num_sums > 0) launch_sums(plan, stream);
  launch(name, find_kernel(plan), grid, stream, plan, slices);
}

}  // namespace hdet::cuda
