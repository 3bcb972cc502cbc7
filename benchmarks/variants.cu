// A step's update alone, on one tensor of as many elements as GPT-2 124M has. Compiled by
// variants.py, which names the variant.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/prepare.h"
#include "cuda/coded.cu"

namespace {

using namespace hdet;

constexpr int64_t kElements = 124439808;
constexpr int kRounds = 21;
const unsigned char kCodebooks[] = {
#include "codebooks.inc"
};

void checked(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
  std::exit(1);
}

template <class T>
T* placed(const std::vector<T>& numbers) {
  T* memory = nullptr;
  checked(cudaMalloc(&memory, numbers.size() * sizeof(T)), "cudaMalloc");
  checked(cudaMemcpy(memory, numbers.data(), numbers.size() * sizeof(T), cudaMemcpyHostToDevice),
          "cudaMemcpy");
  return memory;
}

// Normal numbers as float32, or as the upper half of one; or any 16 bits.
enum class Kind { floats, halves, bits };
__global__ void fill(void* out, Kind kind, float size) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < kElements;
       i += int64_t{gridDim.x} * blockDim.x) {
    const Random4 random = rounding_bits(7, 1, 0, static_cast<uint32_t>(kind), i);
    const float radius =
        sqrtf(-2.0f * logf((static_cast<float>(random.word[0]) + 1.0f) * 0x1p-33f));
    const float x = size * radius * cospif(static_cast<float>(random.word[1]) * 0x1p-31f);
    if (kind == Kind::floats) static_cast<float*>(out)[i] = x;
    else
      static_cast<uint16_t*>(out)[i] =
          kind == Kind::halves ? upper_half(x) : static_cast<uint16_t>(random.word[2]);
  }
}

__global__ void add_up(const uint32_t* words, int64_t count, unsigned long long* sum) {
  unsigned long long own = 0;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x)
    own += words[i] * (2ull * (i % 65521) + 1);
  atomicAdd(sum, own);
}

struct Form {
  const char* name;
  Known known;
  DType number;  // of parameters and gradients
  Master master;
  DType moment;
  double bytes;  // a parameter
};
const Form kForms[] = {
    {"float32", Known::floats, DType::f32, Master::none, DType::f32, 28},
    {"bf16, split", Known::split, DType::bf16, Master::split, DType::f32, 26},
    {"8 bits", Known::floats, DType::f32, Master::none, DType::codes, 16},
    {"8 bits, bf16 split", Known::split, DType::bf16, Master::split, DType::codes, 14},
    {"bf16 throughout, stochastic", Known::halves, DType::bf16, Master::none, DType::bf16, 14},
};

int64_t size_of(DType type) { return type == DType::f32 ? 4 : type == DType::codes ? 1 : 2; }

void launch_plain(const StepPlan& plan, const Form& form, const cuda::Slices& slices) {
  const auto kernel =
      form.known == Known::floats  ? cuda::step_kernel<AdamwRule, false, Known::floats>
      : form.known == Known::split ? cuda::step_kernel<AdamwRule, false, Known::split>
                                   : cuda::step_kernel<AdamwRule, false, Known::halves>;
  cuda::launch("step", kernel, {plan.num_chunks * slices.count, cuda::kStepThreads}, 0, plan,
               slices);
}

template <class Call>
double milliseconds(const Call& call) {
  cudaEvent_t begin, end;
  checked(cudaEventCreate(&begin), "cudaEventCreate");
  checked(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times;
  for (int round = -3; round < kRounds; ++round) {
    float once = 0;
    checked(cudaEventRecord(begin), "cudaEventRecord");
    call();
    checked(cudaEventRecord(end), "cudaEventRecord");
    checked(cudaEventSynchronize(end), "a kernel");
    checked(cudaEventElapsedTime(&once, begin, end), "cudaEventElapsedTime");
    if (round >= 0) times.push_back(once);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void run(const Form& form) {
  const bool coded = form.moment == DType::codes;
  const Kind kind = form.number == DType::f32 ? Kind::floats : Kind::halves;
  void* streams[5];  // gradient, parameter, master, moments
  float* scales[2];
  const int64_t sizes[] = {size_of(form.number), size_of(form.number), 2, size_of(form.moment),
                           size_of(form.moment)};
  for (int i = 0; i < 5; ++i) checked(cudaMalloc(&streams[i], kElements * sizes[i]), "cudaMalloc");
  for (float*& scale : scales) {
    checked(cudaMalloc(&scale, kElements / kCodeBlock * 4), "cudaMalloc");
    checked(cudaMemset(scale, 0, kElements / kCodeBlock * 4), "cudaMemset");
  }
  fill<<<2048, 256>>>(streams[0], kind, 1e-3f);
  fill<<<2048, 256>>>(streams[1], kind, 0.02f);
  fill<<<2048, 256>>>(streams[2], Kind::bits, 0.0f);
  for (int i = 3; i < 5; ++i)
    checked(cudaMemset(streams[i], 0, kElements * sizes[i]), "cudaMemset");

  const int number = static_cast<int>(form.number), moment = static_cast<int>(form.moment);
  const int stochastic = form.moment == DType::bf16 ? 1 : 0;
  const int formats = number | number << 4 | static_cast<int>(form.master) << 8 | moment << 12 |
                      moment << 16 | stochastic << 24;
  constexpr int kLongest = 16384;
  std::vector<Chunk> chunks;
  for (int64_t offset = 0; offset < kElements; offset += kLongest)
    chunks.push_back(
        {offset, offset, 0, std::min(kLongest, static_cast<int>(kElements - offset)), formats});
  StepPlan plan{};
  plan.chunks = placed(chunks);
  plan.num_chunks = static_cast<int64_t>(chunks.size());
  plan.longest = kLongest;
  plan.num_tensors = plan.num_replicas = plan.num_groups = 1;
  plan.known = form.known;
  plan.gradients = placed<void*>({streams[0]});
  void* const master = form.master == Master::none ? nullptr : streams[2];
  plan.addresses =
      placed<void*>({streams[1], master, streams[3], streams[4], scales[0], scales[1], nullptr});
  plan.columns = 7;
  plan.codebooks = reinterpret_cast<const Codebook*>(
      placed<unsigned char>({std::begin(kCodebooks), std::end(kCodebooks)}));
  plan.ids = placed<int32_t>({3});
  plan.rows = placed<HyperRow>(
      {derive_row(Rule::adamw, {1e-3, 0.9, 0.999, 1e-8, 0.1, 0, 0, 0, 0}, 1, 1e-3, 1.0f)});
  plan.replica_rows = placed<ReplicaRow>({{1e-3f, 0.9999f}});
  plan.control = placed<Control>({Control{}});

  const cuda::Slices slices = cuda::slices_of(plan.longest);
  const double ms = milliseconds([&] {
    if (coded) cuda::launch_coded(plan, {plan.num_chunks, cuda::kStepThreads}, 0);
    else launch_plain(plan, form, slices);
  });

  unsigned long long
      *sum = placed<unsigned long long>({0}),
      bits = 0;  // of all that was written: variants that should be alike can be compared
  for (int i = 1; i < 5; ++i)
    add_up<<<1024, 256>>>(static_cast<uint32_t*>(streams[i]), kElements * sizes[i] / 4, sum);
  checked(cudaMemcpy(&bits, sum, sizeof bits, cudaMemcpyDeviceToHost), "cudaMemcpy");
  std::printf(
      "{\"benchmark\": \"variants\", \"variant\": \"%s\", \"formats\": \"%s\", \"ms\": %.4f, "
      "\"gb_s\": %.0f, \"bits\": \"%016llx\"}\n",
      HDET_VARIANT_NAME, form.name, ms, form.bytes * kElements / ms / 1e6, bits);
  for (void* stream : streams) checked(cudaFree(stream), "cudaFree");
}

}  // namespace

int main() {
  for (const Form& form : kForms) run(form);
}
