// Sums of squares on a CPU, one float64 for each chunk. A square of a float32 is exact in float64, and the order of the additions
// is fixed, so every instruction set gives the same bits. Compiled once per instruction set.
#include "kernels.h"

#include "blocks.h"

namespace {

constexpr int kLanes = 64;
static_assert(kBlock % kLanes == 0);

// Element i of a chunk is added in lane i % kLanes.
void add_squares(const float* __restrict values, int length, double* __restrict lanes) {
  int start = 0;
  for (; start + kLanes <= length; start += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += static_cast<double>(values[start + j]) * static_cast<double>(values[start + j]);
  }
  for (int j = 0; start + j < length; ++j) lanes[j] += static_cast<double>(values[start + j]) * static_cast<double>(values[start + j]);
}

double sum_of_squares(const hdet::Chunk& c, void* tensor) {
  Staging buffer;
  const DType type = hdet::unpack_formats(c.formats).gradient;
  double lanes[kLanes] = {};
  over_blocks(c, [&](int64_t element, int length) { add_squares(open(type, tensor, element, length, buffer), length, lanes); });
  double sum = 0.0;
  for (int j = 0; j < kLanes; ++j) sum += lanes[j];
  return sum;
}

}  // namespace

namespace hdet::cpu {

void HDET_VARIANT(norm_)(const Chunk* chunks, void* const* tensors, double* partials, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) partials[i] = sum_of_squares(chunks[i], tensors[chunks[i].tensor]);
}

}  // namespace hdet::cpu
