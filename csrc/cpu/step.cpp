// The AdamW step on a CPU. Compiled once per instruction set: a plain loop that the compiler vectorises. It moves 28 bytes a
// parameter and waits for memory, so intrinsics would gain nothing.
//
// No standard header with inline functions may be used here (see rules.h on comdat copies).
#include "../core/rules.h"
#include "kernels.h"

namespace {

void update(const hdet::HyperRow& shared_row, const float* __restrict g, float* __restrict p, float* __restrict m, float* __restrict v,
            int length) {
  const hdet::HyperRow row = shared_row;  // a copy cannot alias the floats written below
  for (int i = 0; i < length; ++i) hdet::adamw(row, g[i], p[i], m[i], v[i]);
}

}  // namespace

namespace hdet::cpu {

void HDET_VARIANT(adamw_)(const AdamWPlan& plan, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const Chunk& c = plan.chunks[i];
    update(plan.rows[c.row], plan.gradients[c.tensor] + c.offset, plan.params[c.tensor] + c.offset, plan.exp_avgs[c.tensor] + c.offset,
           plan.exp_avg_sqs[c.tensor] + c.offset, c.length);
  }
}

}  // namespace hdet::cpu
