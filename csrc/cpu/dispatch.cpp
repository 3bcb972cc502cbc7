// Chooses the instruction set and cuts a plan over threads. Compiled without any -m flag.
//
// OpenMP. torch brings its own libgomp. Found with torch 2.13 on Linux (LD_DEBUG=bindings,
// /proc/self/maps):
// - torch's copy has the SONAME libgomp.so.1, the name this module links against. The loader keeps
//   one library per SONAME: whichever is loaded first serves both, with one pool of threads.
// - wheels that rename their copy (libgomp-<hash>.so.1) load it through libtorch_global_deps.so
//   with RTLD_GLOBAL. Symbols are looked up there before this module's own dependencies, so
//   GOMP_parallel still binds to torch's copy when torch was imported first. hdet.kernels therefore
//   imports torch before this module. The second library is then mapped but never runs.
// Linking libgomp statically, or a pool of our own, would give two pools that spin against each
// other. For the same reason a call opens one region and not one per tensor: a barrier next to a
// busy neighbour costs milliseconds.
#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "../core/prepare.h"
#include "kernels.h"

namespace hdet::cpu {

#define HDET_DECLARE(isa)                                   \
  void step_##isa(const StepPlan&, int64_t, int64_t);       \
  void average_##isa(const AveragePlan&, int64_t, int64_t); \
  void copy_##isa(const CopyPlan&, int64_t, int64_t);       \
  void norm_##isa(const StepPlan&, int64_t, int64_t);       \
  void sums_##isa(const StepPlan&, int64_t, int64_t);
HDET_DECLARE(baseline)
#ifdef HDET_X86_64
HDET_DECLARE(x86_64_v3)
HDET_DECLARE(x86_64_v4)
#endif

namespace {

// All work on the chunks first <= i < last of a plan.
template <class Plan>
using Loop = void (*)(const Plan& plan, int64_t first, int64_t last);
struct Variant {
  const char* name;
  Loop<StepPlan> step;
  Loop<AveragePlan> average;
  Loop<CopyPlan> copy;
  Loop<StepPlan> norm, sums;
};
#define HDET_LOOPS(isa) step_##isa, average_##isa, copy_##isa, norm_##isa, sums_##isa

// Below this many elements a region costs more than a second thread saves.
constexpr int64_t kParallelElements = 65536;

const std::vector<Variant>& supported() {
  static const std::vector<Variant> list = [] {
    std::vector<Variant> found;
#ifdef HDET_X86_64
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) found.push_back({"x86-64-v4", HDET_LOOPS(x86_64_v4)});
    if (__builtin_cpu_supports("x86-64-v3")) found.push_back({"x86-64-v3", HDET_LOOPS(x86_64_v3)});
#endif
    found.push_back({"baseline", HDET_LOOPS(baseline)});
    return found;
  }();
  return list;
}

const Variant& choose(const std::string& isa) {
  const char* environment = std::getenv("HDET_ISA");
  const std::string wanted = !isa.empty() ? isa : environment != nullptr ? environment : "";
  if (wanted.empty()) return supported().front();
  std::string names;
  for (const Variant& variant : supported()) {
    if (wanted == variant.name) return variant;
    names += std::string(names.empty() ? "" : ", ") + variant.name;
  }
  throw std::invalid_argument((isa.empty() ? "HDET_ISA=" : "isa=") + wanted +
                              " is not available here; choose one of: " + names);
}

// Calls the loop on consecutive shares of about equally many elements, one for each thread.
template <class Plan>
void over_chunks(const Plan& plan, int threads, Loop<Plan> loop) {
  const int64_t count = plan.num_chunks;
  if (count == 0) return;
#ifdef _OPENMP
  const Chunk* const chunks = plan.chunks;
  const int64_t total = chunks[count - 1].begin + chunks[count - 1].length;
  if (threads > 1 && total >= kParallelElements) {
    const auto cut = [=](int64_t share, int64_t shares) {
      const auto before = [](const Chunk& chunk, int64_t elements) {
        return chunk.begin < elements;
      };
      return std::lower_bound(chunks, chunks + count,
                              total / shares * share + total % shares * share / shares, before) -
             chunks;
    };
#pragma omp parallel num_threads(threads)
    {
      const int share = omp_get_thread_num();
      const int shares = omp_get_num_threads();
      loop(plan, cut(share, shares), share + 1 == shares ? count : cut(share + 1, shares));
    }
    return;
  }
#else
  static_cast<void>(threads);
#endif
  loop(plan, 0, count);
}

double sum_in_order(const double* partials, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; partials != nullptr && i < count; ++i) sum += partials[i];
  return sum;
}

// The derive phase. Neighbours mostly have one group and one count, and powers and roots are what
// it costs.
void prepare(const StepPlan& plan) {
  *plan.control = prepare_control(plan, sum_in_order(plan.partials, plan.num_chunks));
  int64_t before = -1;
  for (int64_t tensor = 0; tensor < plan.num_tensors; ++tensor)
    before = prepare_tensor(plan, *plan.control, tensor, before);
}

// The rest of it, for rules that ask for sums: each tensor's are those of its chunks, in order.
void take_in_sums(const StepPlan& plan) {
  for (int64_t tensor = 0; tensor < plan.num_tensors; ++tensor) {
    if (plan.gradients[tensor] == nullptr || plan.num_chunks == 0) continue;
    Whole whole{};
    for (int64_t i = 0; i < num_chunks_of(plan, tensor); ++i) {
      for (int32_t j = 0; j < plan.num_sums; ++j)
        whole.sums[j] += sums_of(plan, tensor)[i * plan.num_sums + j];
    }
    prepare_again(plan, tensor, whole);
  }
}

}  // namespace

std::vector<std::string> variants() {
  std::vector<std::string> names;
  for (const Variant& variant : supported()) names.emplace_back(variant.name);
  return names;
}

bool has_openmp() {
#ifdef _OPENMP
  return true;
#else
  return false;
#endif
}

void step(const StepPlan& plan, int threads, const std::string& isa) {
  const Variant& loops = choose(isa);
  if (plan.partials != nullptr) over_chunks(plan, threads, loops.norm);
  prepare(plan);
  const bool skipped = plan.control->skip != 0.0f;
  if (skipped && plan.zero_gradients == 0) return;
  if (plan.num_sums > 0 && !skipped) {
    over_chunks(plan, threads, loops.sums);
    take_in_sums(plan);
  }
  over_chunks(plan, threads, loops.step);
}

void average(const AveragePlan& plan, int threads, const std::string& isa) {
  over_chunks(plan, threads, choose(isa).average);
}

void copy(const CopyPlan& plan, int threads, const std::string& isa) {
  over_chunks(plan, threads, choose(isa).copy);
}

}  // namespace hdet::cpu
