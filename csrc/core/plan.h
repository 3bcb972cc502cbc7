// The plan of a multi-tensor operation: a list of chunks and tables of addresses, in memory of the
// device that runs it.
//
// A chunk is the unit of work of one thread block, or of several that share it, and of one turn of
// a CPU loop. Offsets of 64 bits appear only here; inside a chunk an index is an int. An empty
// tensor has no chunk, wherever it stands in the list.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "eight_bit.h"
#include "numbers.h"
#include "rules.h"

namespace hdet {

constexpr int kGroupSettings = sizeof(GroupSettings) / sizeof(double);

// 16384 floats are 64 KiB a stream: a step's four streams fit an L2 cache.
constexpr int64_t kChunkElements = 16384, kLeastChunkElements = 2048;
static_assert(kLeastChunkElements % kCodeBlock == 0, "no block of codes lies in two chunks");

// How long chunks are, a power of 2: so that there are `least` of them, as far as the shortest
// allow. A GPU has several blocks on each multiprocessor; a model of a million parameters in 64
// long chunks would leave half of an H200 idle.
inline int64_t chunk_length(const std::vector<int64_t>& elements, int64_t least) {
  const int64_t sum = std::accumulate(elements.begin(), elements.end(), int64_t{0});
  int64_t length = kChunkElements;
  while (length > kLeastChunkElements && sum < least * length) length /= 2;
  return length;
}

struct alignas(16) Chunk {
  int64_t offset;  // elements from the start of its tensor
  int64_t begin;  // elements in all chunks before this one: where the threads of a CPU cut the list
  int32_t tensor;   // column of the address tables, row of the hyperparameters
  int32_t length;   // elements, 1..kChunkElements
  int32_t formats;  // how the tensor's streams are stored: numbers.h
};
static_assert(sizeof(Chunk) == 32, "the Python side allocates chunks of 32 bytes");

inline int64_t count_chunks(const std::vector<int64_t>& elements, int64_t length) {
  int64_t count = 0;
  for (const int64_t n : elements) count += (n + length - 1) / length;
  return count;
}

// Cuts tensor i of elements[i] numbers into chunks of `longest`, and what is left. `out` has room
// for count_chunks().
inline void write_chunks(Chunk* out, const std::vector<int64_t>& elements,
                         const std::vector<int32_t>& formats, int64_t longest) {
  if (elements.size() != formats.size()) throw std::invalid_argument("tables differ in length");
  int64_t begin = 0;
  for (size_t tensor = 0; tensor < elements.size(); ++tensor) {
    for (int64_t offset = 0; offset < elements[tensor]; offset += longest) {
      const auto length = static_cast<int32_t>(std::min(longest, elements[tensor] - offset));
      *out++ = Chunk{offset, begin, static_cast<int32_t>(tensor), length, formats[tensor]};
      begin += length;
    }
  }
}

inline Known known_of(const std::vector<int32_t>& formats) {
  if (formats.empty()) return Known::none;
  const Known first = known_of(unpack_formats(formats.front()));
  const auto same = [first](int32_t packed) { return known_of(unpack_formats(packed)) == first; };
  return std::all_of(formats.begin(), formats.end(), same) ? first : Known::none;
}

// An optimizer step. All pointers are addresses on the device that runs it; tables are indexed by
// Chunk::tensor, those of the replicas by [replica][tensor]. Three phases: norm (where partials is
// set), derive, update.
struct StepPlan {
  const Chunk* chunks;
  int64_t num_chunks;
  int32_t longest;  // elements of the longest chunk
  int64_t num_tensors;
  int32_t num_replicas;
  int32_t num_groups;
  Rule rule;
  int32_t zero_gradients;  // 1: the gradients are zeros afterwards, also where the step was skipped
  Known known;             // of all tensors: the loops need not ask
  uint64_t seed;           // of stochastic rounding
  int32_t first_replica;   // number of the plan's first replica, for random numbers

  // addresses
  void* const* gradients;     // [tensor]; null: none in this step, which leaves the tensor alone
  void* const* params;        // [replica][tensor]
  void* const* masters;       // [replica][tensor], where Formats::master is not none; or null
  void* const* moments;       // [moment][tensor], where Formats::moments is not none
  float* const* scales;       // [moment][tensor][block], where it is codes
  const Codebook* codebooks;  // signed, unsigned; null where no tensor has codes
  float* const* counters;     // [tensor] torch's step counters, float32
  const int32_t* ids;         // [tensor] for random numbers
  const int32_t* groups;      // [tensor] whose settings it has
  const float* const* rates;  // [group] in device memory, or null: GroupSettings::lr

  // from the host, and derived from it
  double* settings;          // hyper.h, rules.h; the rates' addresses may follow
  HyperRow* rows;            // [tensor]
  ReplicaRow* replica_rows;  // [tensor][replica]
  Control* control;
  double* partials;         // [chunk] sums of squares; null: no norm
  const float* grad_scale;  // torch's GradScaler, or null
  const float* found_inf;   // or null

  // Settings that a GPU's derive phase brings along as an argument and writes to `settings`, where
  // no copy has: num_carried words of 8 bytes in host memory.
  const uint64_t* carried;
  int32_t num_carried;
};
constexpr int kCarried = 192;  // at most: 1.5 KiB of a kernel's arguments

// The weighted mean of K co-resident replicas, in place (Eq. 3).
struct AveragePlan {
  const Chunk* chunks;
  int64_t num_chunks;
  int64_t num_tensors;
  int32_t num_replicas;
  int32_t all_float;
  void* const* params;   // [replica][tensor]
  void* const* masters;  // [replica][tensor] or null; where there is one, the mean is of these
  const float* weights;  // [replica], summing to 1; one of weight 0 is not read, but written
};

// destination = scale * source, for two sets of tensors that do not overlap: into a communication
// bucket and out of it. Scale 0 writes zeros without reading, as NaN times zero would be NaN.
// Formats::gradient is the type of the source, Formats::param and Formats::master are those of the
// destination. From a set that has masters one copies those; to a set that has masters both are
// written.
struct CopyPlan {
  const Chunk* chunks;
  int64_t num_chunks;
  int32_t all_float;
  void* const* sources;
  void* const* source_lowers;  // lower halves of sources in the split form; an entry may be null
  void* const* destinations;
  void* const* masters;  // of the destinations; an entry may be null
  float scale;
};

}  // namespace hdet
