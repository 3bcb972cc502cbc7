// The CPU backend. step.cpp, average.cpp and copy.cpp are compiled once per instruction set; dispatch.cpp picks a variant when called.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../core/plan.h"

// HDET_ISA names the variant being compiled (x86_64_v3, baseline, ...) and ends its symbols.
#define HDET_JOIN_(a, b) a##b
#define HDET_JOIN(a, b) HDET_JOIN_(a, b)
#define HDET_VARIANT(name) HDET_JOIN(name, HDET_ISA)

namespace hdet::cpu {

// All work on the chunks first <= i < last of the plan.
using AdamWLoop = void (*)(const AdamWPlan& plan, int64_t first, int64_t last);
using AverageLoop = void (*)(const AveragePlan& plan, int64_t first, int64_t last);
using CopyLoop = void (*)(const CopyPlan& plan, int64_t first, int64_t last);

// Names of the variants this processor can run, best first.
std::vector<std::string> variants();

// Names whether the threads of these calls come from OpenMP.
bool has_openmp();

// One call is at most one parallel region. `isa` names a variant; empty takes the environment's HDET_ISA, else the best.
// Throws std::invalid_argument, before anything is written, for a variant that this processor or this build does not have.
void adamw(const AdamWPlan& plan, int threads, const std::string& isa);
void average(const AveragePlan& plan, int threads, const std::string& isa);
void copy(const CopyPlan& plan, int threads, const std::string& isa);

}  // namespace hdet::cpu
