// The weighted mean of K co-resident replicas on a CPU, in place. Compiled once per instruction
// set.
#include "blocks.h"
#include "kernels.h"

namespace {

// The sums stay in the first-level cache while K sets stream through it: each element is fetched
// once and written once.
void average_block(const hdet::AveragePlan& plan, const hdet::Chunk& c, int64_t element,
                   int length) {
  Staging sums, buffer;
  const hdet::Formats formats = hdet::unpack_formats(c.formats);
  void* const* const row = plan.addresses + int64_t{c.tensor} * 2 * plan.num_replicas;
  const auto param = [&](int32_t k) {
    return Param{formats.param, formats.master, row[k], row[plan.num_replicas + k]};
  };
  start_sums(sums.values, length);
  for (int32_t k = 0; k < plan.num_replicas; ++k) {
    if (plan.weights[k] == 0.0f) continue;
    add_weighted_block(sums.values, plan.weights[k], open(param(k), element, length, buffer),
                       length);
  }
  for (int32_t k = 0; k < plan.num_replicas; ++k) put(param(k), element, length, sums.values);
}

// float32 alone, N sets in one loop: see fused.h.
template <int N>
void average_floats(const hdet::AveragePlan& plan, const hdet::Chunk& c) {
  float* p[N];
  float weights[N];
  for (int k = 0; k < N; ++k) {
    p[k] = at<float>(plan.addresses[int64_t{c.tensor} * 2 * plan.num_replicas + k], c.offset);
    weights[k] = plan.weights[k];
  }
  HDET_INDEPENDENT
  for (int i = 0; i < c.length; ++i) {
    float sum = hdet::kEmptySum;
    HDET_UNROLL
    for (int k = 0; k < N; ++k) sum = hdet::add_weighted(sum, weights[k], p[k][i]);
    HDET_UNROLL
    for (int k = 0; k < N; ++k) p[k][i] = sum;
  }
}

void average_chunk(const hdet::AveragePlan& plan, const hdet::Chunk& c) {
  switch (plan.all_float != 0 ? plan.num_replicas : 0) {
    case 2: return average_floats<2>(plan, c);
    case 3: return average_floats<3>(plan, c);
    case 4: return average_floats<4>(plan, c);
    case 5: return average_floats<5>(plan, c);
    case 6: return average_floats<6>(plan, c);
    case 7: return average_floats<7>(plan, c);
    case 8: return average_floats<8>(plan, c);
    default:
      over_blocks(c, [&](int64_t element, int length) { average_block(plan, c, element, length); });
  }
}

}  // namespace

namespace hdet::cpu {

void HDET_VARIANT(average_)(const AveragePlan& plan, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) average_chunk(plan, plan.chunks[i]);
}

}  // namespace hdet::cpu
