// The weighted mean of K co-resident replicas on a CPU, in place. Compiled once per instruction set; see step.cpp.
#include "../core/rules.h"
#include "kernels.h"

namespace {

// 8 KiB of sums stay in the first-level cache while K rows stream through it: each element is fetched once and written once.
constexpr int kBlock = 2048;

void add_row(float* __restrict sums, float weight, const float* __restrict row, int length) {
  for (int i = 0; i < length; ++i) sums[i] = hdet::add_weighted(sums[i], weight, row[i]);
}

}  // namespace

namespace hdet::cpu {

void HDET_VARIANT(average_)(const AveragePlan& plan, int64_t first, int64_t last) {
  alignas(64) float sums[kBlock];
  for (int64_t i = first; i < last; ++i) {
    const Chunk& c = plan.chunks[i];
    for (int start = 0; start < c.length; start += kBlock) {
      const int length = c.length - start < kBlock ? c.length - start : kBlock;
      const int64_t offset = c.offset + start;
      for (int j = 0; j < length; ++j) sums[j] = kEmptySum;
      for (int32_t k = 0; k < plan.num_replicas; ++k) {
        if (plan.weights[k] == 0.0f) continue;
        add_row(sums, plan.weights[k], plan.addresses[k * plan.num_tensors + c.tensor] + offset, length);
      }
      for (int32_t k = 0; k < plan.num_replicas; ++k) {
        __builtin_memcpy(plan.addresses[k * plan.num_tensors + c.tensor] + offset, sums, static_cast<unsigned long>(length) * sizeof(float));
      }
    }
  }
}

}  // namespace hdet::cpu
