// The CUDA kernels, compiled for the host, behind a C interface for ctypes. A call returns the error's text, or null.
#include <string>

#include "../../../csrc/cuda/average.cu"
#include "../../../csrc/cuda/copy.cu"
#include "../../../csrc/cuda/step.cu"

namespace {
std::string message;

template <class Call>
const char* guarded(const Call& call) {
  try {
    call();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
}  // namespace

extern "C" {

const char* shim_adamw(const hdet::AdamWPlan* plan, int device) {
  return guarded([&] { hdet::cuda::adamw(*plan, device, 0); });
}
const char* shim_average(const hdet::AveragePlan* plan, int device) {
  return guarded([&] { hdet::cuda::average(*plan, device, 0); });
}
const char* shim_copy(const hdet::CopyPlan* plan, int device) {
  return guarded([&] { hdet::cuda::copy(*plan, device, 0); });
}
long shim_vector_accesses() { return vector_accesses; }
int shim_device() { return current_device; }
}
