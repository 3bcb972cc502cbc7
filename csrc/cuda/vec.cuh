// How a thread reads and writes streams of numbers: in the main loop eight elements a turn, with
// accesses of 16 bytes, and at the ends of a chunk one by one. A stream's type is a value, not a
// template argument: the branch on it is the same for a whole block, and one launch serves a model
// of many types. Where the type is a constant to the compiler the branches are gone.
//
// The eight elements are two groups of four. Neighbouring threads hold neighbouring groups, so that
// float32 streams are read and written in whole 32-byte sectors; eight floats in a row for each
// thread would touch every sector twice, and stores are not merged. A 16-bit stream is then
// accessed in 8 bytes, twice. Where all streams of a chunk have 16 bits ("wide") the groups of a
// thread follow each other, and an access is 16 bytes again.
//
// Words that all kernels here use:
// - turn: one pass of a thread through its loop, with eight elements of each stream, or with one at
//   the ends of a chunk
// - head: the elements of a chunk before the first boundary at which an access of full width is
//   aligned; they are done one by one
// - tail: the elements after the last full turn, likewise
// - wide: all streams of the chunk have 16 bits; one access of 16 bytes takes eight elements
// - in step: of a stream whose elements after the head are aligned, too, so that it can be accessed
//   in vectors
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../core/numbers.h"

namespace hdet::cuda {

constexpr int kEight = 8;

// A constant as an argument. What branches on it leave out is not even read by the optimizer, which
// takes most of a compiler's time: after that of a variable would be known to be one.
template <auto kValue>
struct Constant {
  HDET_DEVICE constexpr operator decltype(kValue)() const { return kValue; }
};
template <int kWidth>
using Width = Constant<kWidth>;  // a number of elements
using Float = Constant<DType::f32>;

// Of accesses to streams where a host runs the kernels: tests ask how wide they are.
template <class T>
HDET_DEVICE void counted() {
#if !defined(__CUDACC__)
  ++shim::accesses[sizeof(T)];
#endif
}

// A pointer read from a table is generic to the compiler: it may be shared memory. Saying that it
// is global makes the accesses ld.global/st.global, which are also the ones that can be vectorised
// without a check.
template <class T>
HDET_DEVICE T* global(T* address) {
  __builtin_assume(__isGlobal(address));
  return address;
}

HDET_DEVICE int size_of(DType type) {
  return type == DType::f32 ? 4 : type == DType::codes ? 1 : 2;
}

// The stream from a chunk's first element on. Null stays null.
HDET_DEVICE void* advance(void* stream, DType type, int64_t elements) {
  return stream == nullptr ? nullptr : static_cast<char*>(stream) + elements * size_of(type);
}

// Plain accesses, without hints: as streams that are used once (ld.global.cs, st.global.cs) an H100
// takes 3 % longer for a step.
template <class T>
HDET_DEVICE T read(const void* stream, int element) {
  counted<T>();
  return *global(static_cast<const T*>(stream) + element);
}

template <class T>
HDET_DEVICE void write(void* stream, int element, T value) {
  counted<T>();
  *global(static_cast<T*>(stream) + element) = value;
}

#if defined(__CUDACC__)
// Of the second of two of these nvcc 13.0 forgets that it is to global memory, and splits it.
HDET_DEVICE void write(void* stream, int element, uint2 value) {
  uint2* const address = static_cast<uint2*>(stream) + element;
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(address)),
               "r"(value.x), "r"(value.y)
               : "memory");
}
#endif

// Where a thread's elements are in the chunk: first .. first + 3 and second .. second + 3; or
// `first` alone.
struct Place {
  int first, second;
  bool wide;  // second == first + 4, and 16-bit streams are aligned to 16 bytes
};

// What a thread has of one stream, as it lies in memory. Nothing waits for a load until it is
// unpacked. Streams of 16 bits are in `low` alone; in the split forms the upper halves are in
// `low`, the lower ones, or bytes, in `high`.
template <int kWidth>
struct Raw;
template <>
struct Raw<kEight> {
  uint4 low, high;
};
template <>
struct Raw<1> {
  uint32_t low, high;
};

HDET_DEVICE uint4 read_halves(const void* stream, const Place& at) {
  if (at.wide) return read<uint4>(static_cast<const uint16_t*>(stream) + at.first, 0);
  const uint2 first = read<uint2>(static_cast<const uint16_t*>(stream) + at.first, 0);
  const uint2 second = read<uint2>(static_cast<const uint16_t*>(stream) + at.second, 0);
  return make_uint4(first.x, first.y, second.x, second.y);
}

HDET_DEVICE void write_halves(void* stream, const Place& at, const uint4& words) {
  if (at.wide) return write(static_cast<uint16_t*>(stream) + at.first, 0, words);
  write(static_cast<uint16_t*>(stream) + at.first, 0, make_uint2(words.x, words.y));
  write(static_cast<uint16_t*>(stream) + at.second, 0, make_uint2(words.z, words.w));
}

// `Type`, here and below: DType, or a Constant of it.
template <class Type>
HDET_DEVICE void load(Type type, const void* stream, const Place& at, Raw<kEight>& raw) {
  if (type == DType::f32) {
    raw.low = read<uint4>(static_cast<const float*>(stream) + at.first, 0);
    raw.high = read<uint4>(static_cast<const float*>(stream) + at.second, 0);
  } else {
    raw.low = read_halves(stream, at);
  }
}

template <class Type>
HDET_DEVICE void load(Type type, const void* stream, const Place& at, Raw<1>& raw) {
  if (type == DType::f32) raw.low = read<uint32_t>(stream, at.first);
  else raw.low = read<uint16_t>(stream, at.first);
}

// Streams of bytes: four in a word.
HDET_DEVICE uint2 read_bytes(const void* stream, const Place& at) {
  const auto bytes = static_cast<const uint8_t*>(stream);
  return make_uint2(read<uint32_t>(bytes + at.first, 0), read<uint32_t>(bytes + at.second, 0));
}

// Lower halves; or, of split24, their first bytes.
HDET_DEVICE void load_lower(const void* stream, bool bytes, const Place& at, Raw<kEight>& raw) {
  if (!bytes) {
    raw.high = read_halves(stream, at);
  } else {
    const uint2 words = read_bytes(stream, at);
    raw.high.x = words.x, raw.high.y = words.y;
  }
}

HDET_DEVICE void load_lower(const void* stream, bool bytes, const Place& at, Raw<1>& raw) {
  raw.high = bytes ? read<uint8_t>(stream, at.first) << 8 : read<uint16_t>(stream, at.first);
}

HDET_DEVICE uint32_t word(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

HDET_DEVICE uint16_t half_of(const uint4& words, int i) {
  return static_cast<uint16_t>(i % 2 == 0 ? word(words, i / 2) : word(words, i / 2) >> 16);
}

template <class Type>
HDET_DEVICE void unpack(Type type, const Raw<kEight>& raw, float (&out)[kEight]) {
  if (type == DType::f32) {
#pragma unroll
    for (int i = 0; i < kEight; ++i)
      out[i] = float_of(i < 4 ? word(raw.low, i) : word(raw.high, i - 4));
  } else if (type == DType::bf16) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) out[i] = from_bf16(half_of(raw.low, i));
  } else {
#pragma unroll
    for (int i = 0; i < kEight; ++i) out[i] = from_f16(half_of(raw.low, i));
  }
}

template <class Type>
HDET_DEVICE void unpack(Type type, const Raw<1>& raw, float (&out)[1]) {
  if (type == DType::f32) out[0] = float_of(raw.low);
  else out[0] = from_16(type, static_cast<uint16_t>(raw.low));
}

// `bytes`: of split24.
HDET_DEVICE void unpack_split(const Raw<kEight>& raw, bool bytes, float (&out)[kEight]) {
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const uint32_t byte = (i < 4 ? raw.high.x : raw.high.y) >> 8 * (i % 4) << 8;
    out[i] = join(half_of(raw.low, i), bytes ? static_cast<uint16_t>(byte) : half_of(raw.high, i));
  }
}

HDET_DEVICE void unpack_split(const Raw<1>& raw, bool, float (&out)[1]) {
  out[0] = join(static_cast<uint16_t>(raw.low), static_cast<uint16_t>(raw.high));
}

// 16-bit numbers made by half(i), or two in a word by pair(i) of i and i + 1.
template <int kWidth, class Half, class Pair>
HDET_DEVICE void store_halves(void* stream, const Place& at, const Half& half, const Pair& pair) {
  if constexpr (kWidth == 1) write<uint16_t>(stream, at.first, half(0));
  else write_halves(stream, at, make_uint4(pair(0), pair(2), pair(4), pair(6)));
}

template <int kWidth, class Half>
HDET_DEVICE void store_halves(void* stream, const Place& at, const Half& half) {
  store_halves<kWidth>(stream, at, half, [&](int i) {
    return static_cast<uint32_t>(half(i)) | static_cast<uint32_t>(half(i + 1)) << 16;
  });
}

HDET_DEVICE void store_floats(void* stream, const Place& at, const float (&x)[kEight]) {
  write(static_cast<float*>(stream) + at.first, 0,
        make_uint4(bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3])));
  write(static_cast<float*>(stream) + at.second, 0,
        make_uint4(bits_of(x[4]), bits_of(x[5]), bits_of(x[6]), bits_of(x[7])));
}

HDET_DEVICE void store_floats(void* stream, const Place& at, const float (&x)[1]) {
  write(stream, at.first, x[0]);
}

// Bytes made by byte(i).
template <int kWidth, class Byte>
HDET_DEVICE void store_bytes(void* stream, const Place& at, const Byte& byte) {
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < kWidth; ++i) words[i / 4] |= static_cast<uint32_t>(byte(i)) << 8 * (i % 4);
  const auto bytes = static_cast<uint8_t*>(stream);
  if constexpr (kWidth == 1) return write(bytes, at.first, static_cast<uint8_t>(words[0]));
  write(bytes + at.first, 0, words[0]);
  write(bytes + at.second, 0, words[1]);
}

// To nearest.
template <class Type, int kWidth>
HDET_DEVICE void store(Type type, void* stream, const Place& at, const float (&x)[kWidth]) {
  if (type == DType::f32) store_floats(stream, at, x);
  else if (type == DType::bf16)
    store_halves<kWidth>(
        stream, at, [&](int i) { return to_bf16(x[i]); },
        [&](int i) { return to_bf16_pair(x[i], x[i + 1]); });
  else store_halves<kWidth>(stream, at, [&](int i) { return to_f16(x[i]); });
}

// A parameter and what stands beside it, from a chunk's first element on. Its value is that of the
// master where it has one.
template <class Type = DType, class Kind = Master>
struct Param {
  Type type;
  Kind kind;
  void* param;
  void* master;

  template <int kWidth>
  HDET_DEVICE void load(const Place& at, Raw<kWidth>& raw) const {
    const Kind constant = kind;
    if (constant == Master::f32) {
      cuda::load(Float(), master, at, raw);
    } else {
      cuda::load(type, param, at, raw);
      if (is_split(constant)) load_lower(master, constant == Master::split24, at, raw);
    }
  }

  template <int kWidth>
  HDET_DEVICE void unpack(const Raw<kWidth>& raw, float (&out)[kWidth]) const {
    const Kind constant = kind;
    if (is_split(constant)) unpack_split(raw, constant == Master::split24, out);
    else if (constant == Master::f32) cuda::unpack(Float(), raw, out);
    else cuda::unpack(type, raw, out);
  }

  // What split24 holds of them, to nearest: before a store.
  template <int kWidth>
  HDET_DEVICE void round(float (&x)[kWidth]) const {
    const Kind constant = kind;
    if (constant == Master::split24) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = to_24(x[i]);
    }
  }

  template <int kWidth>
  HDET_DEVICE void store(const Place& at, const float (&x)[kWidth]) const {
    const Kind constant = kind;
    if (is_split(constant)) {
      store_halves<kWidth>(param, at, [&](int i) { return upper_half(x[i]); });
      const auto lower = [&](int i) { return lower_half(x[i]); };
      if (constant == Master::split) store_halves<kWidth>(master, at, lower);
      else store_bytes<kWidth>(master, at, [&](int i) { return lower(i) >> 8; });
    } else {
      if (constant == Master::f32) store_floats(master, at, x);
      cuda::store(type, param, at, x);
    }
  }
};

template <class Type, class Kind>
HDET_DEVICE Param<Type, Kind> param_at(Type type, Kind kind, void* param, void* master,
                                       int64_t offset) {
  return {type, kind, advance(param, type, offset),
          kind == Master::none ? nullptr : advance(master, type_of(kind), offset)};
}

// How a chunk is cut: `head` elements one by one, `turns` turns of eight, and the rest one by one.
struct Cut {
  int head, turns, tail, gap;
  bool wide;
};

// Elements up to the first boundary that a stream of 16 bits, or else of 32, needs for its widest
// access.
HDET_DEVICE int head_of(const void* stream, DType type, bool wide) {
  const int unit = wide ? kEight : 4;
  const int past =
      static_cast<int>(reinterpret_cast<std::uintptr_t>(stream) / size_of(type) % unit);
  return (unit - past) % unit;
}

// Whether a stream that starts here can be accessed in vectors after `head` elements. Null is no
// stream.
HDET_DEVICE bool in_step(const void* stream, DType type, int head, bool wide) {
  const int unit = wide && size_of(type) == 2 ? kEight : 4;
  const auto place = reinterpret_cast<std::uintptr_t>(stream) / size_of(type);
  return stream == nullptr || (static_cast<int>(place % unit) + head) % unit == 0;
}

template <class Type, class Kind>
HDET_DEVICE bool in_step(const Param<Type, Kind>& p, int head, bool wide) {
  return in_step(p.param, p.type, head, wide) &&
         (p.kind == Master::none || in_step(p.master, type_of(p.kind), head, wide));
}

// `vectors`: whether all streams are in step. Otherwise the chunk is done one by one.
HDET_DEVICE Cut cut(int length, int head, bool wide, bool vectors) {
  if (!vectors || head >= length) return {length, 0, length, 0, wide};
  const int unit = wide ? kEight : 4;
  const int units = (length - head) / unit;
  const int turns = wide ? units : (units + 1) / 2;
  return {head, turns, head + units * unit, wide ? 4 : 4 * turns, wide};
}

// Where the number of groups is odd, the last turn has one group twice: it is read twice and then
// written twice, with the same values.
HDET_DEVICE Place place_of(const Cut& c, int turn) {
  const int first = c.head + turn * (c.wide ? kEight : 4);
  const int second = first + c.gap;
  return {first, second < c.tail ? second : first, c.wide};
}

// one(place) for what is left besides the turns. The head and the tail in one loop: two copies
// would only fill the instruction cache.
template <int kThreads, class One>
HDET_DEVICE void over_ends(const Cut& c, int length, int thread, const One& one) {
  const int ends = c.head + (length - c.tail);
#pragma unroll 1
  for (int i = thread; i < ends; i += kThreads)
    one(Place{i < c.head ? i : i - c.head + c.tail, 0, false});
}

// A thread's share of a chunk: work.turn<kEight>(place) for each turn and work.turn<1>(place) for
// what is left.
template <int kThreads, class Work>
HDET_DEVICE void over_elements(const Cut& c, int length, int thread, const Work& work) {
#pragma unroll 1
  for (int turn = thread; turn < c.turns; turn += kThreads)
    work.template turn<kEight>(place_of(c, turn));
  over_ends<kThreads>(c, length, thread, [&](const Place& at) { work.template turn<1>(at); });
}

}  // namespace hdet::cuda
