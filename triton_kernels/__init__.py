"""The kernels in Triton, written once for every format and rule: csrc/core in another language,
with the same results.

numbers.py is numbers.h and philox.h, rules.py is rules.h, hyper.py is hyper.h; the other files hold
one kernel family each. They run where Triton runs and need no build of hdet;
hdet/kernels/triton/__init__.py prepares their tables and launches them.

Arithmetic is float32, never contracted into fused multiply-adds (`enable_fp_fusion=False` at every
launch), with division and square root rounded to nearest, so that results have the bits of the
native kernels. A hyperparameter is always read from device memory: as a Python number it would be
part of what Triton compiles for.
"""
