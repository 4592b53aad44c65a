# `make repro` runs the pipeline, `make test` the tests. Needs git, make and Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(abspath $(VENV))/bin

.PHONY: install repro ablations test docs gpu hostile coverage mutants wheel audit

# Install the package and its tools into .venv.
install: $(VENV)/.ready

# Run the whole pipeline and print the table of results.
repro: $(VENV)/.ready
	@$(BIN)/duplex params --check
	@echo "2/4 draw and encode images, train and evaluate the runs of params.yaml: a line per finished run, some minutes"
	@PATH="$(BIN):$$PATH" $(BIN)/duplex sweep
	@echo "3/4 dvc repro, which repeats no run, writes the report"
	@PATH="$(BIN):$$PATH" $(BIN)/dvc repro
	@echo "4/4 test results in percent, two seeds; docs/tables.md has five"
	@$(BIN)/duplex metrics

# Run the ablations, and write the report again with their tables.
ablations: $(VENV)/.ready
	@cd ablations && PATH="$(BIN):$$PATH" && duplex params --check && duplex sweep && dvc repro
	@$(BIN)/duplex report

# Run the tests that take minutes; ARGS are passed to pytest, THREADS is the number of threads of each of its processes.
# `passive`: threads that wait sleep. Else those of several processes take each other's cores, and tests take hours.
THREADS ?= 1
test: $(VENV)/.ready
	@PATH="$(BIN):$$PATH" OMP_NUM_THREADS=$(THREADS) OMP_WAIT_POLICY=passive \
	    $(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

# Check the manual, and write it as a site: site/index.html.
docs: $(VENV)/.ready
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@$(BIN)/python -m docs.builder --site

# Check results and measure speed on a GPU (ten minutes), and write a part of docs/speed.md.
gpu: $(VENV)/.ready
	@PATH="$(BIN):$$PATH" $(BIN)/python -m benchmarks.gpu $(ARGS)

# Run the long tests: damaged files, commands killed at random moments, searches, uploads, benchmarks.
hostile: $(VENV)/.ready
	@PATH="$(BIN):$$PATH" $(BIN)/python -m pytest -m long -o faulthandler_timeout=3600 $(ARGS)

# List the lines that no test runs.
coverage: $(VENV)/.ready
	@PATH="$(BIN):$$PATH" $(BIN)/python -m coverage run -m pytest $(ARGS)
	@$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report

# List small changes of the code that no test notices.
mutants: $(VENV)/.ready
	@$(BIN)/python -m benchmarks.mutants $(ARGS)

# Build the wheel, test it in a fresh environment, and write that environment's bill of materials beside it. The wheel's files have
# the time of the commit: the same commit gives the same bytes.
wheel: $(VENV)/.ready
	@rm -rf dist build && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
	    $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@rm -rf $(VENV)-wheel && $(PYTHON) -m venv $(VENV)-wheel
	@$(VENV)-wheel/bin/python -m pip install --quiet --constraint constraints.txt "$$(echo dist/duplex_czsl-*.whl)[pipeline]"
	@$(VENV)-wheel/bin/python release/materials.py dist/duplex_czsl-*.whl
	@$(VENV)-wheel/bin/python tests/smoke.py && rm -rf $(VENV)-wheel

# Look up the versions of constraints.txt in PyPI's database of vulnerabilities; fails if one has any, or cannot be looked up.
audit:
	@test -d $(VENV)-audit || $(PYTHON) -m venv $(VENV)-audit
	@$(VENV)-audit/bin/python -m pip install --quiet --constraint constraints.txt pip_audit
	@$(VENV)-audit/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt $(ARGS)

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "1/4 install torch and other packages into $(VENV): pip prints nothing for some minutes"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
