// An optimizer step on a GPU: norm (where one is asked for), derive, update.
#include "kernels.h"
#include "launch.cuh"
#include "step.cuh"

namespace hdet::cuda {
namespace {

// With averages over time several replicas, and bfloat16 throughout, have the kernel of any
// formats.
auto kernel_for(const StepPlan& plan) {
  const bool averages = plan.emas != nullptr;
  return with_rule(plan.rule, [&](auto rule) {
    return with_known(plan.known, [&](auto known) {
      using Rule = decltype(rule);
      constexpr Known kKnown = decltype(known)::value;
      constexpr Known kOfHalves = kKnown == Known::halves ? Known::none : kKnown;
      if (plan.num_replicas == 1) {
        return averages ? step_kernel<Rule, false, kOfHalves, true>
                        : step_kernel<Rule, false, kKnown>;
      }
      return averages ? step_kernel<Rule, true, Known::none> : step_kernel<Rule, true, kOfHalves>;
    });
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
  if (plan.codebooks != nullptr) launch_coded(plan, grid, stream);
  else launch(name, kernel_for(plan), grid, stream, plan, slices);
}

}  // namespace hdet::cuda
