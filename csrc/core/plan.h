// The plan of a multi-tensor operation: a list of chunks and tables of addresses, in memory of the device that runs it.
//
// A chunk is the unit of work of one thread block or one turn of a CPU loop. Offsets of 64 bits appear only here; inside a chunk
// an index is an int. An empty tensor has no chunk, wherever it stands in the list.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "hyper.h"

namespace hdet {

// 16384 floats are 64 KiB a stream: a step's four streams fit an L2 cache, and a 1M-element tensor still gives 64 blocks.
constexpr int64_t kChunkElements = 16384;

struct alignas(16) Chunk {
  int64_t offset;  // elements from the start of its tensor
  int64_t begin;   // elements in all chunks before this one: where the threads of a CPU cut the list
  int32_t tensor;  // column of the address tables
  int32_t length;  // elements, 1..kChunkElements
  int32_t row;     // row of the hyperparameter table
  int32_t unused;
};
static_assert(sizeof(Chunk) == 32, "the Python side allocates chunks of 32 bytes");

inline int64_t chunks_of(int64_t elements) { return (elements + kChunkElements - 1) / kChunkElements; }

inline int64_t count_chunks(const std::vector<int64_t>& elements) {
  int64_t count = 0;
  for (const int64_t n : elements) count += chunks_of(n);
  return count;
}

// Cuts tensor i of elements[i] floats, whose hyperparameters are in row rows[i], into chunks. `out` has room for count_chunks().
inline void write_chunks(Chunk* out, const std::vector<int64_t>& elements, const std::vector<int32_t>& rows) {
  int64_t begin = 0;
  for (size_t tensor = 0; tensor < elements.size(); ++tensor) {
    for (int64_t offset = 0; offset < elements[tensor]; offset += kChunkElements) {
      const auto length = static_cast<int32_t>(std::min(kChunkElements, elements[tensor] - offset));
      *out++ = Chunk{offset, begin, static_cast<int32_t>(tensor), length, rows[tensor], 0};
      begin += length;
    }
  }
}

// torch keeps a step counter for each parameter: a 0-d float32 tensor on the host. `steps` is an array of their addresses.
inline void add_to_steps(std::uintptr_t steps, int64_t count, float amount) {
  float* const* const counters = reinterpret_cast<float* const*>(steps);
  for (int64_t i = 0; i < count; ++i) *counters[i] += amount;
}

// All pointers are addresses on the device that runs the plan; tables are indexed by Chunk::tensor.
struct AdamWPlan {
  const Chunk* chunks;
  int64_t num_chunks;
  const HyperRow* rows;
  const float* const* gradients;
  float* const* params;
  float* const* exp_avgs;
  float* const* exp_avg_sqs;
};

struct AveragePlan {
  const Chunk* chunks;
  int64_t num_chunks;
  float* const* addresses;  // [replica][tensor]
  int64_t num_tensors;
  int32_t num_replicas;
  const float* weights;  // [replica], summing to 1; a replica of weight 0 does not enter the mean but receives it
};

// Packing into a communication bucket and unpacking from it: destination = scale * source, tensor by tensor. No overlap.
struct CopyPlan {
  const Chunk* chunks;
  int64_t num_chunks;
  const float* const* sources;
  float* const* destinations;
  float scale;  // 0 writes zeros without reading: NaN times zero would be NaN
};

}  // namespace hdet
