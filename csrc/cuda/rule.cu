// The kernels of one rule, HDET_RULE, or of AnyRule. CMake compiles this file for each of them, so
// that the cores of a machine share the work.
#include "coded.cuh"

namespace hdet::cuda {
namespace {

// hdet/kernels/checks.py refuses several replicas of the others.
template <class Rule>
constexpr bool kStepsMany = !Rule::kGivesParameter;

// Formats that are known: of one replica, of several, with averages over time, and of codes.
template <class Rule, Known kKnown>
StepKernel usual_kernel(const StepPlan& plan) {
  if (plan.codebooks != nullptr) return coded_kernel<Rule, false, kKnown>;
  if constexpr (kStepsMany<Rule>) {
    if (plan.num_replicas > 1) return step_kernel<Rule, true, kKnown>;
  }
  return plan.emas != nullptr ? step_kernel<Rule, false, kKnown, true>
                              : step_kernel<Rule, false, kKnown>;
}

template <class Rule, bool kMany>
StepKernel any_kernel(const StepPlan& plan) {
  return plan.codebooks != nullptr ? coded_kernel<Rule, kMany, Known::none>
                                   : step_kernel<Rule, kMany, Known::none>;
}

template <class Rule>
StepKernel find_kernel(const StepPlan& plan) {
  if constexpr (kIsAny<Rule>) {
    return plan.num_replicas > 1 ? any_kernel<Rule, true>(plan) : any_kernel<Rule, false>(plan);
  } else {
    switch (plan.known) {
      case Known::floats: return usual_kernel<Rule, Known::floats>(plan);
      case Known::masters: return usual_kernel<Rule, Known::masters>(plan);
      case Known::split: return usual_kernel<Rule, Known::split>(plan);
      case Known::halves: return step_kernel<Rule, false, Known::halves>;
      case Known::none:
        if constexpr (kMixes<Rule>) return any_kernel<Rule, false>(plan);
        break;
    }
    __builtin_unreachable();
  }
}

}  // namespace

template <>
StepKernel kernel_for<HDET_RULE>(const StepPlan& plan) {
  return find_kernel<HDET_RULE>(plan);
}

}  // namespace hdet::cuda
