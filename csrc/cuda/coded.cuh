// The update where moments are codes of 8 bits. A warp has a block of codes, eight elements a
// thread: the rule's new moments stay in registers until shuffles have found the block's largest
// ones, and then become codes. AdamW on float32 parameters moves 16 bytes a parameter, on split
// bfloat16 with bfloat16 gradients 14. Codes are looked up in tables in shared memory. What a warp
// needs of its next block is on its way meanwhile, which saves an H100 7 to 11 % of the time
// (docs/evidence/gpu.md).
//
// At the ends of a tensor, and where streams are not aligned, elements are done one by one, and
// twice: once to find the largest.
#pragma once

#include "step.cuh"

namespace hdet::cuda {

constexpr int kWarp = 32;
static_assert(kCodeBlock == kWarp * kEight);

// A moment from a chunk's first element on, and its table in shared memory.
struct Codes {
  uint8_t* codes;
  float* scales;
  const Codebook* book;

  // As they lie in memory: four in a word.
  HDET_DEVICE uint2 load(const Place& at, Width<kEight>) const { return read_bytes(codes, at); }
  HDET_DEVICE uint2 load(const Place& at, Width<1>) const {
    return make_uint2(read<uint8_t>(codes, at.first), 0);
  }

  template <int kWidth>
  HDET_DEVICE void decode(float scale, const uint2& words, float (&out)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      out[i] = book->values[(i < 4 ? words.x : words.y) >> 8 * (i % 4) & 255u] * scale;
  }

  template <bool kSigned, int kWidth>
  HDET_DEVICE void store(const Place& at, float scale, const float (&x)[kWidth]) const {
    const Shares shares = shares_of(scale);
    store_bytes<kWidth>(codes, at,
                        [&](int i) { return encode<kSigned>(*book, share_of(shares, x[i])); });
  }
};

template <class Rule, bool kMany, Known kKnown>
struct Coded : Update<Rule, kMany, kKnown> {
  using Base = Update<Rule, kMany, kKnown>;
  using Base::chunk, Base::count, Base::formats, Base::gradient, Base::kBatch, Base::plan,
      Base::row;

  // Eight elements or one, as they lie in memory, with the scales of their block; exact moments as
  // they are. Of many replicas' parameters none: they would not fit.
  template <int kWidth>
  struct Loaded {
    Raw<kWidth> gradient, param;
    Raw<kWidth> exact[Rule::kMoments];
    uint2 moments[Rule::kMoments];
    float scales[Rule::kMoments];
  };

  // The same between the rule and the codes.
  template <int kWidth>
  struct Turn {
    Raw<kWidth> params[kBatch];
    float moments[Rule::kMoments][kWidth] = {}, u[kWidth];
  };
  template <class T>
  using Each = PerThread<T, kStepThreads>;

  Codes codes[Rule::kMoments];
  bool vectors;

  HDET_DEVICE Coded(const StepPlan& p, const Chunk& c) : Base(p, c) {}

  // Of a chunk that is coded. `books`: where their tables will be.
  HDET_DEVICE void prepare(Codebook* books) {
    vectors = Base::prepare_replicas(0, false) && Base::emas_are_in_step(0) &&
              in_step(gradient, formats.gradient, 0, false);
    each<Rule::kMoments>([&](auto j) {
      if (!is_coded(j)) {
        vectors = vectors && in_step(Base::moments[j], DType::f32, 0, false);
        return;
      }
      codes[j] = {static_cast<uint8_t*>(moment_of(plan, chunk.tensor, j)) + chunk.offset,
                  scales_of(plan, chunk.tensor, j) + chunk.offset / kCodeBlock,
                  books + (Base::is_signed(j) ? 0 : 1)};
      vectors = vectors && aligned(codes[j]);
    });
  }

  HDET_DEVICE bool is_exact(int j) const {
    if constexpr (kIsAny<Rule>) return formats.moment(j) == DType::f32;
    else return Rule::is_exact(j);
  }
  HDET_DEVICE bool is_coded(int j) const { return !is_exact(j) && Base::keeps(j); }
  HDET_DEVICE static bool aligned(const Codes& moment) {
    return reinterpret_cast<std::uintptr_t>(moment.codes) % 4 == 0;
  }

  // `block`: number of the block of codes in the chunk.
  template <int kWidth>
  HDET_DEVICE void load_elements(const Place& at, int block, Loaded<kWidth>& loaded) const {
    load(formats.gradient, gradient, at, loaded.gradient);
    each<Rule::kMoments>([&](auto j) {
      if (is_coded(j)) loaded.moments[j] = codes[j].load(at, Width<kWidth>{});
      else if (is_exact(j)) load(Float(), Base::moments[j], at, loaded.exact[j]);
    });
    if (!kMany) Base::param(Base::replica(0)).load(at, loaded.param);
    each<Rule::kMoments>([&](auto j) {
      if (is_coded(j)) loaded.scales[j] = *global(codes[j].scales + block);
    });
  }

  // New moments and the direction; nothing is written.
  template <int kWidth>
  HDET_DEVICE void compute(const Place& at, const Loaded<kWidth>& loaded,
                           Turn<kWidth>& turn) const {
    if (kMany) Base::load_batch(0, at, turn.params);
    else turn.params[0] = loaded.param;
    float g[kWidth], p[kWidth] = {};
    unpack(formats.gradient, loaded.gradient, g);
    each<Rule::kMoments>([&](auto j) {
      if (is_coded(j)) codes[j].decode(loaded.scales[j], loaded.moments[j], turn.moments[j]);
      else if (is_exact(j)) unpack(Float(), loaded.exact[j], turn.moments[j]);
    });
    if (Rule::kCoupled && count() == 1) Base::param(Base::replica(0)).unpack(turn.params[0], p);
    Base::take_direction(g, p, turn.moments, turn.u);
  }

  // All that is written of these elements.
  template <int kWidth>
  HDET_DEVICE void keep(const Place& at, const float (&scales)[Rule::kMoments],
                        Turn<kWidth>& turn) const {
    uint32_t bits[kWidth];
    each<Rule::kMoments>([&](auto j) {
      if (is_exact(j)) store_floats(Base::moments[j], at, turn.moments[j]);
      else if (!is_coded(j)) return;
      else if (Base::is_signed(j)) codes[j].template store<true>(at, scales[j], turn.moments[j]);
      else codes[j].template store<false>(at, scales[j], turn.moments[j]);
    });
    if (plan.zero_gradients != 0) Base::template clear_gradient<kWidth>(at);
    Base::follow_all(at, turn.params, turn.u, bits);
  }

  template <int kWidth>
  HDET_DEVICE static uint32_t largest(const float (&x)[kWidth], uint32_t bits) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      bits = magnitude_bits(x[i]) < bits ? bits : magnitude_bits(x[i]);
    return bits;
  }

  template <int kWidth>
  HDET_DEVICE void add_largest(const Turn<kWidth>& turn, uint32_t (&found)[Rule::kMoments]) const {
    each<Rule::kMoments>([&](auto j) {
      if (is_coded(j)) found[j] = largest(turn.moments[j], found[j]);
    });
  }

  HDET_DEVICE bool is_whole(int block) const {
    return vectors && (block + 1) * kCodeBlock <= chunk.length;
  }
  HDET_DEVICE static Place place_in(int block, int lane) {
    return {block * kCodeBlock + 4 * lane, block * kCodeBlock + 4 * (lane + kWarp), false};
  }

  // one(place, turn) for the elements of a thread, of a block that is not whole, after their new
  // moments are computed.
  template <class One>
  HDET_DEVICE void one_by_one(int block, int lane, const One& one) const {
    const int end =
        (block + 1) * kCodeBlock < chunk.length ? (block + 1) * kCodeBlock : chunk.length;
#pragma unroll 1
    for (int i = block * kCodeBlock + lane; i < end; i += kWarp) {
      const Place at{i, 0, false};
      Loaded<1> loaded;
      Turn<1> turn;
      load_elements(at, block, loaded);
      compute(at, loaded, turn);
      one(at, turn);
    }
  }

  // Whether a block is loaded while the one before it is stored, for which kernels of any format
  // and of many replicas lack registers.
  static constexpr bool kAhead = !kMany && kKnown != Known::none;

  // Begins to load a whole block; of others nothing.
  HDET_DEVICE void load_block(int block, int lane, Loaded<kEight>& loaded) const {
    if (is_whole(block)) load_elements(place_in(block, lane), block, loaded);
  }

  // A block of codes for each warp. `loaded`, if kAhead: theirs, and afterwards that of the next
  // blocks.
  HDET_DEVICE void blocks(int start, Each<Loaded<kEight>>& loaded) const {
    Each<Turn<kEight>> turns;
    Each<uint32_t> largests[Rule::kMoments];
    threads([&](int thread) {
      const int block = start + thread / kWarp, lane = thread % kWarp;
      uint32_t found[Rule::kMoments] = {};
      if (is_whole(block)) {
        Turn<kEight>& turn = turns[thread];
        if (!kAhead) load_block(block, lane, loaded[thread]);
        compute(place_in(block, lane), loaded[thread], turn);
        if (kAhead) load_block(block + kStepThreads / kWarp, lane, loaded[thread]);
        add_largest(turn, found);
      } else {
        one_by_one(block, lane,
                   [&](const Place&, const Turn<1>& turn) { add_largest(turn, found); });
      }
      each<Rule::kMoments>([&](auto j) { largests[j][thread] = found[j]; });
    });
    each<Rule::kMoments>([&](auto j) {
      if (is_coded(j)) largest_of_warps(largests[j]);
    });
    threads([&](int thread) {
      const int block = start + thread / kWarp, lane = thread % kWarp;
      float scales[Rule::kMoments];
      each<Rule::kMoments>([&](auto j) { scales[j] = scale_of(largests[j][thread]); });
      if (is_whole(block)) {
        keep(place_in(block, lane), scales, turns[thread]);
      } else {
        one_by_one(block, lane, [&](const Place& at, Turn<1>& turn) { keep(at, scales, turn); });
      }
    });
    warps_meet();  // until here the old scales are read
    threads([&](int thread) {
      const int block = start + thread / kWarp;
      if (thread % kWarp != 0 || block * kCodeBlock >= chunk.length) return;
      each<Rule::kMoments>([&](auto j) {
        if (is_coded(j)) *global(codes[j].scales + block) = scale_of(largests[j][thread]);
      });
    });
  }

  // Fills shared memory, while the first blocks are on their way.
  HDET_DEVICE void update_codes(Codebook* books) const {
    if (Base::skipped()) {
      threads([&](int thread) {
        for (int i = thread; i < chunk.length; i += kStepThreads)
          Base::template clear_gradient<1>(Place{i, 0, false});
      });
      return;
    }
    Each<Loaded<kEight>> loaded;
    if (kAhead)
      threads([&](int thread) { load_block(thread / kWarp, thread % kWarp, loaded[thread]); });
    phase([&](int thread) {
      constexpr int kUnits = (Rule::kSquares ? 2 : 1) * sizeof(Codebook) / sizeof(uint4);
      const auto from = reinterpret_cast<const uint4*>(plan.codebooks);
      const auto to = reinterpret_cast<uint4*>(books);
      for (int i = thread; i < kUnits; i += kStepThreads) to[i] = *global(from + i);
    });
    for (int start = 0; start * kCodeBlock < chunk.length; start += kStepThreads / kWarp)
      blocks(start, loaded);
  }
};

// As many blocks as ptxas can make without a spill: while a warp waits for its tables and shuffles,
// others go on.
template <class Rule, Known kKnown>
constexpr int coded_blocks_per_multiprocessor() {
  if (kIsAny<Rule>) return 2;
  if (Rule::kMoments > 2 || kKnown == Known::none) return 4;
  if (Rule::kCoupled) return kKnown == Known::floats ? 5 : 4;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return 5;
#else
  return kKnown == Known::split ? 5 : 6;
#endif
}

template <class Rule, bool kMany, Known kKnown>
__global__ void __launch_bounds__(kStepThreads, coded_blocks_per_multiprocessor<Rule, kKnown>())
    coded_kernel(const __grid_constant__ StepPlan plan, const Slices /*whole chunks*/) {
  __shared__ Codebook books[Rule::kSquares ? 2 : 1];
  const Chunk& chunk = plan.chunks[blockIdx.x];
  after_the_kernel_before();
  if (without_gradient(plan, chunk)) return;
  Coded<Rule, kMany, kKnown> update(plan, chunk);
  const bool nothing_to_do = update.skipped() && plan.zero_gradients == 0;
  if (nothing_to_do) return;
  // Known does not say whether moments are codes.
  const bool is_coded = unpack_formats(chunk.formats).moments[0] == DType::codes;
  if (!is_coded) return update_chunk<Rule, kMany, kKnown, kKnown == Known::none>(update);
  update.prepare(books);
  update.update_codes(books);
}

}  // namespace hdet::cuda
