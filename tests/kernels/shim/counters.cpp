// What the shim has counted, for ctypes.
#include "cuda_runtime.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED long shim_accesses(int bytes) { return shim::accesses[bytes]; }
EXPORTED long shim_launches() { return shim::launches; }
EXPORTED long shim_early() { return shim::early; }
EXPORTED int shim_device() { return shim::device; }
EXPORTED void shim_set_device(int device) { shim::device = device; }
