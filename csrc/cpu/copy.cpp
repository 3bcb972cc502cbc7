// The scaled copy on a CPU: parameters into a bucket and back. Compiled once per instruction set; see step.cpp.
#include "../core/plan.h"
#include "kernels.h"

namespace {

void write_scaled(float scale, const float* __restrict source, float* __restrict destination, int length) {
  for (int i = 0; i < length; ++i) destination[i] = scale * source[i];
}

}  // namespace

namespace hdet::cpu {

void HDET_VARIANT(copy_)(const CopyPlan& plan, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const Chunk& c = plan.chunks[i];
    float* const destination = plan.destinations[c.tensor] + c.offset;
    if (plan.scale == 0.0f) {
      __builtin_memset(destination, 0, static_cast<unsigned long>(c.length) * sizeof(float));
    } else {
      write_scaled(plan.scale, plan.sources[c.tensor] + c.offset, destination, c.length);
    }
  }
}

}  // namespace hdet::cpu
