# make demo: from a clean clone to a trained model.   make test: the whole suite.   Both create .venv first.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint wheel clean

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

test: $(BIN)/hdet.stamp
	$(BIN)/python -m pytest -q

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
	cd build/wheel && venv/bin/python -c "import hdet; print(hdet.__version__, hdet.kernels.available()); hdet.FusedAdamW, hdet.OneCycleAutoLR, hdet.Ensemble" && venv/bin/hdet doctor

clean:
	rm -rf $(VENV) build dist *.egg-info hdet/*.so
