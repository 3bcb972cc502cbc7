# make demo: from a clean clone to a trained model.   make test: the whole suite.   make docs: the site.   All create .venv first.
# make gpu: builds for the GPU here, tests and times everything on it; with the torch of $(PYTHON), and nothing from a network.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test docs gpu lint wheel clean

# torch first and by itself: whatever depends on it then finds it installed and pulls no other build.
$(BIN)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	touch $@

$(BIN)/hdet.stamp: $(BIN)/torch.stamp pyproject.toml setup.py CMakeLists.txt $(shell find csrc -type f)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: $(BIN)/hdet.stamp
	$(BIN)/hdet train --compare --out runs/demo --overwrite

# Two processes, a file's tests in one of them; what watches clocks afterwards, alone.
test: $(BIN)/hdet.stamp
	$(BIN)/python -m pytest -q -n 2 --dist loadscope --ignore tests/faults
	$(BIN)/python -m pytest -q tests/faults

$(BIN)/docs.stamp: $(BIN)/hdet.stamp
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	touch $@

# The site, into build/site; nothing is fetched but the extra's packages. A broken link, anchor or docstring reference ends it; so do long sentences.
docs: $(BIN)/docs.stamp
	$(BIN)/python docs/sentences.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# No environment and no pip: the module is built in place, with the pybind11, cmake and ninja that are there, and any setuptools.
# RESULTS=folder gets copies of what is written.
gpu:
	@$(PYTHON) -c "import torch; assert torch.cuda.is_available()" || { echo "make gpu: the torch of $(PYTHON) finds no GPU here; nothing was run. PYTHON=... names another one"; exit 1; }
	HDET_CUDA=1 $(PYTHON) -m benchmarks.build
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu $(if $(RESULTS),--results "$(RESULTS)")

lint: $(BIN)/hdet.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The wheel must work without this folder: built, installed into an empty environment that has only torch, imported and used.
wheel: $(BIN)/torch.stamp
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet $(TORCH)
	build/wheel/venv/bin/python -m pip install --quiet build/wheel/*.whl
	cd build/wheel && venv/bin/python -c "import hdet; print(hdet.__version__, hdet.kernels.available()); hdet.OneCycleAutoLR, hdet.Ensemble, hdet.CoresidentReplicas" && venv/bin/python -c "import torch, hdet; p = torch.nn.Parameter(torch.ones(4)); p.grad = torch.ones(4); hdet.FusedAdamW([p], lr=0.5).step(); assert p.max() < 0.6" && venv/bin/hdet doctor

clean:
	rm -rf $(VENV) build dist *.egg-info hdet/*.so
