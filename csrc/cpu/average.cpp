// The weighted mean of K co-resident replicas on a CPU, in place. Compiled once per instruction set.
#include "kernels.h"

#include "blocks.h"

namespace {

// The sums stay in the first-level cache while K sets stream through it: each element is fetched once and written once.
void average_block(const hdet::AveragePlan& plan, const hdet::Chunk& c, int64_t element, int length) {
  Staging sums, buffer;
  const hdet::Formats formats = hdet::unpack_formats(c.formats);
  const Master kind = plan.masters == nullptr ? Master::none : formats.master;
  const auto param = [&](int32_t k) {
    const int64_t place = k * plan.num_tensors + c.tensor;
    return Param{formats.param, kind, plan.params[place], entry(plan.masters, place)};
  };
  start_sums(sums.values, length);
  for (int32_t k = 0; k < plan.num_replicas; ++k) {
    if (plan.weights[k] == 0.0f) continue;
    add_weighted_block(sums.values, plan.weights[k], open(param(k), element, length, buffer), length);
  }
  for (int32_t k = 0; k < plan.num_replicas; ++k) put(param(k), element, length, sums.values);
}

}  // namespace

namespace hdet::cpu {

void HDET_VARIANT(average_)(const AveragePlan& plan, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    over_blocks(plan.chunks[i], [&](int64_t element, int length) { average_block(plan, plan.chunks[i], element, length); });
  }
}

}  // namespace hdet::cpu
