// The CUDA backend, as the host sees it: no CUDA header, so that bindings.cpp compiles without one.
#pragma once

#include <cstdint>

#include "../core/plan.h"

namespace hdet::cuda {

// Everything a plan points to lies in memory of `device`, and no call reads it. All launches go to
// `stream` (a cudaStream_t as an integer); nothing waits. They throw std::runtime_error naming the
// CUDA call that failed. The device stays the calling thread's current one: the caller puts back
// what was.

// Two launches, derive and update; one more for a norm, two more for sums over tensors.
void step(const StepPlan& plan, int device, std::uintptr_t stream);

void average(const AveragePlan& plan, int device, std::uintptr_t stream);
void copy(const CopyPlan& plan, int device, std::uintptr_t stream);

}  // namespace hdet::cuda
