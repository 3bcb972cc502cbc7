// The phases of a step that have files of their own.
#pragma once

#include <cstdint>

#include "../core/plan.h"
#include "launch.cuh"

namespace hdet::cuda {

// One float64 sum of squares for each chunk.
void launch_norm(const Chunk* chunks, int64_t num_chunks, void* const* tensors, double* partials,
                 std::uintptr_t stream);

// Settings, norm, scaler and step counters -> control, rows and replica rows.
void launch_derive(const StepPlan& plan, std::uintptr_t stream);

// The update where the moments of some tensors are codes: one launch for all tensors, too.
void launch_coded(const StepPlan& plan, const Grid& grid, std::uintptr_t stream);

}  // namespace hdet::cuda
