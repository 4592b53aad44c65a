# The two commands a newcomer needs: `make repro` and `make test`. Needs git, make and Python 3.10 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(abspath $(VENV))/bin

.PHONY: repro ablations test gpu hostile coverage mutants wheel

repro: $(VENV)/.ready
	@$(BIN)/duplex params --check
	@PATH="$(BIN):$$PATH" $(BIN)/duplex sweep
	@PATH="$(BIN):$$PATH" $(BIN)/dvc repro
	@$(BIN)/duplex metrics

ablations: $(VENV)/.ready
	@$(BIN)/duplex params --check
	@cd ablations && PATH="$(BIN):$$PATH" $(BIN)/dvc repro
	@$(BIN)/duplex report

test: $(VENV)/.ready
	@PATH="$(BIN):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

# Under ten minutes on one GPU; writes docs/gpu.md. Where there is none it says so.
gpu: $(VENV)/.ready
	@PATH="$(BIN):$$PATH" $(BIN)/python -m benchmarks.gpu $(ARGS)

# What takes many minutes: ten thousand damaged files of each kind, commands killed at any moment.
hostile: $(VENV)/.ready
	@PATH="$(BIN):$$PATH" $(BIN)/python -m pytest -m long -o faulthandler_timeout=3600 $(ARGS)

# For those who change it: lines that no test runs; changes that no test notices; the package in a fresh environment.
coverage: $(VENV)/.ready
	@PATH="$(BIN):$$PATH" $(BIN)/python -m coverage run -m pytest $(ARGS)
	@$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report

mutants: $(VENV)/.ready
	@$(BIN)/python -m benchmarks.mutants $(ARGS)

wheel: $(VENV)/.ready
	@rm -rf dist build && $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@rm -rf $(VENV)-wheel && $(PYTHON) -m venv $(VENV)-wheel
	@$(VENV)-wheel/bin/python -m pip install --quiet --constraint constraints.txt "$$(echo dist/duplex-*.whl)[pipeline]"
	@$(VENV)-wheel/bin/python tests/smoke.py && rm -rf $(VENV)-wheel

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
