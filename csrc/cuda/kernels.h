// The CUDA backend, as the host sees it: no CUDA header, so that bindings.cpp compiles without one.
#pragma once

#include <cstdint>

#include "../core/plan.h"

namespace hdet::cuda {

// Everything a plan points to lies in memory of `device`, and no call reads it. All launches go to `stream` (a cudaStream_t as an
// integer); nothing waits. They throw std::runtime_error naming the CUDA call that failed. The device stays the calling thread's current
// one: the caller puts back what was.

// Two launches, derive and update; with a norm before them three.
void step(const StepPlan& plan, int device, std::uintptr_t stream);

void average(const AveragePlan& plan, int device, std::uintptr_t stream);
void pair(const PairPlan& plan, int device, std::uintptr_t stream);

// Norm of tensors of the type Formats::gradient: partials[num_chunks] are left behind, *result is the root of their sum.
void norm(const Chunk* chunks, int64_t num_chunks, void* const* tensors, double* partials, float* result, int device,
          std::uintptr_t stream);

}  // namespace hdet::cuda
