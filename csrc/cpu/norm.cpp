// Sums of squares on a CPU, one float64 for each chunk. A square of a float32 is exact in float64,
// and the order of the additions is fixed, so every instruction set gives the same bits. Compiled
// once per instruction set.
#include "blocks.h"
#include "kernels.h"

namespace {

// Lanes that stay in registers: left to itself a compiler keeps them in memory. GCC and Clang split
// what the processor lacks.
using Floats = float __attribute__((vector_size(16)));
using Doubles = double __attribute__((vector_size(32)));
constexpr int kWidth = 4, kVectors = 8, kLanes = kWidth * kVectors;
static_assert(kBlock % kLanes == 0);

// Element i of a chunk is added in lane i % kLanes.
void add_squares(const float* values, int length, double* lanes) {
  Doubles sums[kVectors];
  __builtin_memcpy(sums, lanes, sizeof sums);
  int start = 0;
  for (; start + kLanes <= length; start += kLanes) {
    HDET_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      Floats x;
      __builtin_memcpy(&x, values + start + j * kWidth, sizeof x);
      const Doubles wide = __builtin_convertvector(x, Doubles);
      sums[j] += wide * wide;
    }
  }
  __builtin_memcpy(lanes, sums, sizeof sums);
  for (int j = 0; start + j < length; ++j)
    lanes[j] += static_cast<double>(values[start + j]) * static_cast<double>(values[start + j]);
}

double sum_of_squares(const hdet::Chunk& c, void* tensor) {
  if (tensor == nullptr) return 0.0;
  Staging buffer;
  const DType type = hdet::unpack_formats(c.formats).gradient;
  double lanes[kLanes] = {};
  over_blocks(c, [&](int64_t element, int length) {
    add_squares(open(type, tensor, element, length, buffer), length, lanes);
  });
  double sum = 0.0;
  for (int j = 0; j < kLanes; ++j) sum += lanes[j];
  return sum;
}

}  // namespace

namespace hdet::cpu {

void HDET_VARIANT(norm_)(const StepPlan& plan, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i)
    plan.partials[i] = sum_of_squares(plan.chunks[i], plan.gradients[plan.chunks[i].tensor]);
}

}  // namespace hdet::cpu
