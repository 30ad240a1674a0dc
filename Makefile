# make help | install | course | lab | test | lint | notebooks | format | unsloth | te | torchao | clean
#
#   PYTHON=python3.12   the interpreter that .venv is made of (3.11 or 3.12)
#   VENV=.venv          where it is made
#   SCALE=auto          tiny (any CPU), small (a GPU of 8 GB), full (the article's own); auto: the largest that fits
#   ARGS=...            more for JupyterLab (make lab) or pytest (make test)
#   JOBS=1              labs at once in `make course`; more of them disturb each other's measurements
#   RESULTS=DIR         where `make course` keeps its results; run again, it goes on where it stopped

PYTHON  ?= python3
VENV    ?= .venv
SCALE   ?= auto
JOBS    ?= 1
RESULTS ?= results/course
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
SELDOM  := '/tests?/|/testing/|/transformers/models/|/diffusers/pipelines/|/pip/|/setuptools/'
PIP     := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
# What a run leaves in a notebook is taken out: all but the sources, and the metadata that stored notebooks have.
UNRUN   := $(BIN)/python -m jupyter nbconvert --log-level=WARN --inplace --clear-output \
  --ClearMetadataPreprocessor.enabled=True \
  $(addprefix --ClearMetadataPreprocessor.preserve_cell_metadata_mask=,tags lines_to_next_cell) \
  $(addprefix --ClearMetadataPreprocessor.preserve_nb_metadata_mask=,kernelspec jupytext)

.DEFAULT_GOAL := help
.PHONY: help install course test lab lint format notebooks unsloth te torchao clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

install: $(STAMP)

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || { \
	  echo "There is no $(PYTHON) here. The course needs Python 3.11 or 3.12: make PYTHON=/path/to/python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1). The course needs Python 3.11 or 3.12: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) could not make $(VENV). On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 2; }

$(STAMP): requirements.txt constraints.txt pyproject.toml | $(BIN)/python
	$(PIP) --no-compile -r requirements.txt
	@# On all cores, where pip takes one; without what the course hardly touches. Templates don't compile: || true
	@$(BIN)/python -m compileall -qq -j 0 -x $(SELDOM) $(VENV)/lib || true
	@touch $@

course: install
	@$(BIN)/labutils doctor || echo "The labs run all the same: each says what it could not do here."
	@status=0; $(BIN)/labutils run --scale $(SCALE) --jobs $(JOBS) --results $(RESULTS) || status=$$?; \
	[ $$status -eq 2 ] || [ $$status -eq 130 ] || { \
	  echo; $(BIN)/labutils report --results $(RESULTS) | tee $(RESULTS)/scoreboard.txt; echo; \
	  echo "The scoreboard above is kept in $(RESULTS)/scoreboard.txt; with pictures, predictions and what to try next it"; \
	  echo "is $(RESULTS)/notebooks/11_scoreboard.ipynb. All executed labs, to read in a browser: $(RESULTS)/index.html"; \
	  echo "Read and change the labs yourself: make lab"; }; \
	exit $$status

# Tests that share the cores disturb each other's clocks, so what fails (exit status 1) is run again with nothing beside it.
test: install
	@status=0; \
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS) || status=$$?; \
	[ $$status -eq 1 ] || exit $$status; \
	echo; echo "What failed is run once more, one test at a time:"; \
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(ARGS)

lab: install
	JUPYTER_CONFIG_PATH="$(CURDIR)/jupyter$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}" $(BIN)/python -m jupyter lab $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if [ -x $(BIN)/hadolint ]; then echo $(BIN)/hadolint Dockerfile; $(BIN)/hadolint Dockerfile; fi
	$(BIN)/python -m pytest -q tests/test_style.py tests/test_architecture.py

# The newer half of each notebook's pair overwrites the older one; then both are formatted, what a run left in them is
# taken out, and both halves agree again.
format notebooks: install
	$(BIN)/jupytext --quiet --sync notebooks/py/*.py notebooks/optional/py/*.py
	$(BIN)/ruff check --quiet --fix --exit-zero $(if $(filter notebooks,$@),notebooks,.)
	$(BIN)/ruff format $(if $(filter notebooks,$@),notebooks,.)
	$(UNRUN) notebooks/*.ipynb notebooks/optional/*.ipynb
	$(BIN)/jupytext --quiet --sync notebooks/*.ipynb notebooks/optional/*.ipynb

unsloth te torchao: install
	$(PIP) -c constraints.txt -e '.[$@]'

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
