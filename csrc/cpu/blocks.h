// Blocks: what the loops of a CPU work on. A block of a stream is seen as float32, where it lies if
// it is float32, else in a staging buffer that the first-level cache holds. So formats are looked
// at once a block, and the arithmetic is plain float loops.
//
// Included by sources that are compiled once per instruction set: everything is local to them, and
// no standard header with inline functions may be used (see portable.h on comdat copies).
#pragma once

#include "../core/arithmetic.h"
#include "../core/philox.h"
#include "../core/plan.h"

// The streams of a plan do not overlap, and a loop over the sets of a batch becomes straight code.
#if defined(__clang__)
#define HDET_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define HDET_UNROLL _Pragma("clang loop unroll(full)")
#else
#define HDET_INDEPENDENT _Pragma("GCC ivdep")
#define HDET_UNROLL _Pragma("GCC unroll 8")
#endif

// a source uses what it needs; `inline` would have all of this inlined
#pragma GCC diagnostic ignored "-Wunused-function"

namespace {

using hdet::DType;
using hdet::Master;

// 4 KiB a stream: a step with everything switched on has eight.
constexpr int kBlock = 1024;

struct alignas(64) Staging {
  float values[kBlock];
};

template <class T>
T* at(void* stream, int64_t element) {
  return static_cast<T*>(stream) + element;
}

void widen(DType type, const uint16_t* __restrict numbers, float* __restrict values, int length) {
  if (type == DType::bf16) {
    for (int i = 0; i < length; ++i) values[i] = hdet::from_bf16(numbers[i]);
  } else {
    for (int i = 0; i < length; ++i) values[i] = hdet::from_f16(numbers[i]);
  }
}

void narrow(DType type, const float* __restrict values, uint16_t* __restrict numbers, int length) {
  if (type == DType::bf16) {
    for (int i = 0; i < length; ++i) numbers[i] = hdet::to_bf16(values[i]);
  } else {
    for (int i = 0; i < length; ++i) numbers[i] = hdet::to_f16(values[i]);
  }
}

void narrow_stochastic(const float* __restrict values, const uint16_t* __restrict random,
                       uint16_t* __restrict numbers, int length) {
  for (int i = 0; i < length; ++i) numbers[i] = hdet::to_bf16(values[i], random[i]);
}

// A block of a stream as float32, to be read, or changed and then put back.
float* open(DType type, void* stream, int64_t element, int length, Staging& staging) {
  if (type == DType::f32) return at<float>(stream, element);
  widen(type, at<const uint16_t>(stream, element), staging.values, length);
  return staging.values;
}

// Writes a block that open() gave and the caller has changed, or any other. `random`: 16 bits a
// number, for bfloat16, or null.
void put(DType type, void* stream, int64_t element, int length, const float* values,
         const uint16_t* random = nullptr) {
  if (type == DType::f32) {
    float* const target = at<float>(stream, element);
    if (target != values)
      __builtin_memcpy(target, values, static_cast<unsigned long>(length) * sizeof(float));
  } else if (random != nullptr) {
    narrow_stochastic(values, random, at<uint16_t>(stream, element), length);
  } else {
    narrow(type, values, at<uint16_t>(stream, element), length);
  }
}

// A moment and what belongs to it.
struct Moment {
  DType type;
  bool is_signed;
  void* numbers;
  float* scales;               // of codes
  const hdet::Codebook* book;  // likewise
};

using hdet::kCodeBlock;
static_assert(kBlock % kCodeBlock == 0, "a block of a stream holds whole blocks of codes");

// These loops have one step of the way each, so that reads from tables are vectorised where there
// is an instruction for them.
void decode(const hdet::Codebook& book, float scale, const uint8_t* __restrict codes,
            float* __restrict values, int length) {
  const float* const table = book.values;
  int32_t places[kCodeBlock];
  for (int i = 0; i < length; ++i) places[i] = codes[i];
  for (int i = 0; i < length; ++i) values[i] = table[places[i]] * scale;
}

template <bool kSigned>
void encode(const hdet::Codebook& book, float scale, const float* __restrict values,
            uint8_t* __restrict codes, int length) {
  const uint32_t* const table = book.parts;
  float shares[kCodeBlock];
  uint32_t places[kCodeBlock], parts[kCodeBlock];
  const hdet::Shares shares_in = hdet::shares_of(scale);
  for (int i = 0; i < length; ++i) {
    shares[i] = hdet::share_of(shares_in, values[i]);
    places[i] =
        hdet::place_of(kSigned ? hdet::float_of(hdet::magnitude_bits(shares[i])) : shares[i]);
  }
  for (int i = 0; i < length; ++i) parts[i] = table[places[i] >> 16];
  for (int i = 0; i < length; ++i)
    codes[i] = static_cast<uint8_t>(hdet::code_of<kSigned>(shares[i], places[i], parts[i]));
}

uint32_t largest_bits(const float* __restrict values, int length) {
  uint32_t largest = 0;
  for (int i = 0; i < length; ++i) {
    const uint32_t bits = hdet::magnitude_bits(values[i]);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// The blocks of codes among these elements, the first of which begins one: work(start, length, its
// number).
template <class Work>
void over_code_blocks(int64_t element, int length, const Work& work) {
  for (int start = 0; start < length; start += kCodeBlock) {
    work(start, length - start < kCodeBlock ? length - start : kCodeBlock,
         (element + start) / kCodeBlock);
  }
}

// A block of a moment as float32.
float* open(const Moment& m, int64_t element, int length, Staging& staging) {
  if (m.type != DType::codes) return open(m.type, m.numbers, element, length, staging);
  over_code_blocks(element, length, [&](int start, int count, int64_t block) {
    decode(*m.book, m.scales[block], at<const uint8_t>(m.numbers, element + start),
           staging.values + start, count);
  });
  return staging.values;
}

void put(const Moment& m, int64_t element, int length, const float* values,
         const uint16_t* random = nullptr) {
  if (m.type != DType::codes) return put(m.type, m.numbers, element, length, values, random);
  over_code_blocks(element, length, [&](int start, int count, int64_t block) {
    const float scale = m.scales[block] = hdet::scale_of(largest_bits(values + start, count));
    uint8_t* const codes = at<uint8_t>(m.numbers, element + start);
    if (m.is_signed) encode<true>(*m.book, scale, values + start, codes, count);
    else encode<false>(*m.book, scale, values + start, codes, count);
  });
}

// `Lower`: of 16 bits, or the first 8 of them.
template <class Lower>
constexpr int kMissing = 16 - 8 * static_cast<int>(sizeof(Lower));

template <class Lower>
void join_halves(const uint16_t* __restrict upper, const Lower* __restrict lower,
                 float* __restrict values, int length) {
  for (int i = 0; i < length; ++i)
    values[i] = hdet::join(upper[i], static_cast<uint16_t>(lower[i] << kMissing<Lower>));
}

template <class Lower>
void split_halves(const float* __restrict values, uint16_t* __restrict upper,
                  Lower* __restrict lower, int length) {
  for (int i = 0; i < length; ++i) {
    const float value = kMissing<Lower> == 0 ? values[i] : hdet::to_24(values[i]);
    upper[i] = hdet::upper_half(value);
    lower[i] = static_cast<Lower>(hdet::lower_half(value) >> kMissing<Lower>);
  }
}

// What split24 stores of these.
void round_to_24(float* __restrict values, const uint16_t* __restrict random, int length) {
  for (int i = 0; i < length; ++i) values[i] = hdet::to_24(values[i], random[i] & 0xffu);
}

// A parameter and what stands beside it.
struct Param {
  DType type;
  Master kind;
  void* param;
  void* master;
};

// The parameter's value: its master's where it has one.
float* open(const Param& p, int64_t element, int length, Staging& staging) {
  if (p.kind == Master::f32) return at<float>(p.master, element);
  if (p.kind == Master::none) return open(p.type, p.param, element, length, staging);
  const uint16_t* const upper = at<const uint16_t>(p.param, element);
  if (p.kind == Master::split)
    join_halves(upper, at<const uint16_t>(p.master, element), staging.values, length);
  else join_halves(upper, at<const uint8_t>(p.master, element), staging.values, length);
  return staging.values;
}

// `random` rounds a parameter that has no master.
void put(const Param& p, int64_t element, int length, const float* values,
         const uint16_t* random = nullptr) {
  uint16_t* const upper = at<uint16_t>(p.param, element);
  if (p.kind == Master::split)
    return split_halves(values, upper, at<uint16_t>(p.master, element), length);
  if (p.kind == Master::split24)
    return split_halves(values, upper, at<uint8_t>(p.master, element), length);
  if (p.kind == Master::f32) put(DType::f32, p.master, element, length, values);
  put(p.type, p.param, element, length, values, p.kind == Master::none ? random : nullptr);
}

void add_weighted_block(float* __restrict sums, float weight, const float* __restrict values,
                        int length) {
  for (int i = 0; i < length; ++i) sums[i] = hdet::add_weighted(sums[i], weight, values[i]);
}

void start_sums(float* sums, int length) {
  for (int i = 0; i < length; ++i) sums[i] = hdet::kEmptySum;
}

// The blocks of a chunk: work(element, length), elements counted from the start of the tensor.
template <class Work>
void over_blocks(const hdet::Chunk& chunk, const Work& work) {
  for (int start = 0; start < chunk.length; start += kBlock) {
    work(chunk.offset + start, chunk.length - start < kBlock ? chunk.length - start : kBlock);
  }
}

}  // namespace
