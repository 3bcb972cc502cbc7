// Operations between two sets of tensors on a CPU: into a bucket and back, a running average, an exchange. Compiled once per
// instruction set.
#include "kernels.h"

#include "blocks.h"

namespace {

using hdet::PairPlan;
using hdet::Pairing;

void write_scaled(float scale, const float* __restrict source, float* __restrict destination, int length) {
  for (int i = 0; i < length; ++i) destination[i] = hdet::scaled(scale, source[i]);
}

// Through a buffer in the first-level cache, bytes as they are.
void exchange(char* a, char* b, int length) {
  Staging buffer;
  const auto bytes = static_cast<unsigned long>(length);
  __builtin_memcpy(buffer.values, a, bytes);
  __builtin_memcpy(a, b, bytes);
  __builtin_memcpy(b, buffer.values, bytes);
}

void pair_block(const PairPlan& plan, const hdet::Chunk& c, int64_t element, int length) {
  Staging source_buffer, destination_buffer;
  const hdet::Formats formats = hdet::unpack_formats(c.formats);
  void* const lower = entry(plan.source_lowers, c.tensor);
  void* const master = entry(plan.masters, c.tensor);
  const Param source{formats.gradient, lower != nullptr ? Master::split : Master::none, plan.sources[c.tensor], lower};
  const Param destination{formats.param, master != nullptr ? formats.master : Master::none, plan.destinations[c.tensor], master};

  if (plan.pairing == Pairing::swap) {
    const int size = formats.param == DType::f32 ? 4 : 2;
    exchange(at<char>(source.param, element * size), at<char>(destination.param, element * size), length * size);
    if (lower != nullptr && master != nullptr) exchange(at<char>(lower, element * 2), at<char>(master, element * 2), length * 2);
    return;
  }
  if (plan.pairing == Pairing::lerp) {
    const float* const from = open(source, element, length, source_buffer);
    float* const to = open(destination, element, length, destination_buffer);
    move_towards(to, plan.scale, from, length);
    put(destination, element, length, to);
    return;
  }
  const bool direct = destination.kind == Master::none && destination.type == DType::f32;
  float* const to = direct ? at<float>(destination.param, element) : destination_buffer.values;
  if (plan.scale == 0.0f) __builtin_memset(to, 0, static_cast<unsigned long>(length) * sizeof(float));
  else write_scaled(plan.scale, open(source, element, length, source_buffer), to, length);
  put(destination, element, length, to);
}

}  // namespace

namespace hdet::cpu {

void HDET_VARIANT(pair_)(const PairPlan& plan, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    over_blocks(plan.chunks[i], [&](int64_t element, int length) { pair_block(plan, plan.chunks[i], element, length); });
  }
}

}  // namespace hdet::cpu
