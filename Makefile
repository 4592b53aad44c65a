# The two commands a newcomer needs: `make repro` and `make test`. Needs git, make and Python 3.10 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(abspath $(VENV))/bin

.PHONY: repro ablations test

repro: $(VENV)/.ready
	@$(BIN)/duplex params --check
	@PATH="$(BIN):$$PATH" $(BIN)/dvc repro
	@$(BIN)/duplex metrics

ablations: $(VENV)/.ready
	@$(BIN)/duplex params --check
	@cd ablations && PATH="$(BIN):$$PATH" $(BIN)/dvc repro
	@$(BIN)/duplex report

test: $(VENV)/.ready
	@PATH="$(BIN):$$PATH" $(BIN)/python -m pytest $(ARGS)

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
