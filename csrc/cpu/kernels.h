// The CPU backend. All sources but dispatch.cpp are compiled once per instruction set; dispatch.cpp
// picks a variant when called.
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

// Names of the variants this processor can run, best first.
std::vector<std::string> variants();

// Whether the threads of these calls come from OpenMP.
bool has_openmp();

// One parallel region for each phase that touches elements: norm, sums of a rule, update.
// `isa` names a variant; empty takes the environment's HDET_ISA, else the best. Throws
// std::invalid_argument, before anything is written, for a variant that this processor or this
// build does not have.
void step(const StepPlan& plan, int threads, const std::string& isa);
void average(const AveragePlan& plan, int threads, const std::string& isa);
void copy(const CopyPlan& plan, int threads, const std::string& isa);

}  // namespace hdet::cpu
