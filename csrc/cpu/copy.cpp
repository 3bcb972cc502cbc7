// A scaled copy of one set of tensors to another on a CPU: into a bucket and back. Compiled once
// per instruction set.
#include "blocks.h"
#include "kernels.h"

namespace {

using hdet::CopyPlan;

void write_scaled(float scale, const float* __restrict source, float* __restrict destination,
                  int length) {
  for (int i = 0; i < length; ++i) destination[i] = hdet::scaled(scale, source[i]);
}

void copy_block(const CopyPlan& plan, const hdet::Chunk& c, int64_t element, int length) {
  Staging source_buffer, destination_buffer;
  const hdet::Formats formats = hdet::unpack_formats(c.formats);
  void* const* const row = plan.addresses + int64_t{4} * c.tensor;
  const Param source{formats.gradient, hdet::source_master(formats), row[0], row[1]};
  const Param destination{formats.param, formats.master, row[2], row[3]};

  const bool direct = destination.kind == Master::none && destination.type == DType::f32;
  float* const to = direct ? at<float>(destination.param, element) : destination_buffer.values;
  if (plan.scale == 0.0f)
    __builtin_memset(to, 0, static_cast<unsigned long>(length) * sizeof(float));
  else write_scaled(plan.scale, open(source, element, length, source_buffer), to, length);
  put(destination, element, length, to);
}

}  // namespace

namespace hdet::cpu {

void HDET_VARIANT(copy_)(const CopyPlan& plan, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    over_blocks(plan.chunks[i], [&](int64_t element, int length) {
      copy_block(plan, plan.chunks[i], element, length);
    });
  }
}

}  // namespace hdet::cpu
