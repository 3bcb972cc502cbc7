"""The CUDA sources on the host: csrc/cuda compiled by a C++ compiler behind cuda_runtime.h, as a
second hdet._C, under sanitizers."""
