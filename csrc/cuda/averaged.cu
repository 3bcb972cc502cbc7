// The update of one replica with averages over time, 8 bytes a parameter more for each: where
// formats are known. In a file of its own, as these kernels take as long to compile as all others.
#include "launch.cuh"
#include "step.cuh"

namespace hdet::cuda {

void launch_averaged(const StepPlan& plan, const Grid& grid, const Slices& slices,
                     std::uintptr_t stream) {
  const auto kernel = with_rule(plan.rule, [&](auto rule) {
    using Rule = decltype(rule);
    if (plan.known == Known::floats) return step_kernel<Rule, false, Known::floats, true>;
    if (plan.known == Known::masters) return step_kernel<Rule, false, Known::masters, true>;
    return step_kernel<Rule, false, Known::split, true>;
  });
  launch("cudaLaunchKernelEx(step)", kernel, grid, stream, plan, slices);
}

}  // namespace hdet::cuda
