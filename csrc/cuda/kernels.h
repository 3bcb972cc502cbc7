// The CUDA backend, as the host sees it: no CUDA header, so that bindings.cpp compiles without one.
#pragma once

#include <cstdint>

#include "../core/plan.h"

namespace hdet::cuda {

// Everything a plan points to lies in memory of `device`. One launch on `stream` (a cudaStream_t as an integer), no
// synchronisation. Throws std::runtime_error naming the CUDA call that failed.
void adamw(const AdamWPlan& plan, int device, std::uintptr_t stream);
void average(const AveragePlan& plan, int device, std::uintptr_t stream);
void copy(const CopyPlan& plan, int device, std::uintptr_t stream);

}  // namespace hdet::cuda
