# make help | install | doctor | course | lab | test | lint | notebooks | format | unsloth | te | trl | clean
#
#   PYTHON=python3.12   the interpreter that .venv is made of (3.11 or 3.12)
#   VENV=.venv          where it is made
#   SCALE=auto          tiny (any CPU), small (a GPU of 8 GB), full (the article's own); auto: the largest that fits
#   ARGS=...            more for JupyterLab (make lab) or pytest (make test)
#   RESULTS=DIR         where `make course` keeps its results; run again, it goes on where it stopped

PYTHON  ?= python3
VENV    ?= .venv
SCALE   ?= auto
RESULTS ?= results/course
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
OURS    := $(VENV)/.made-by-make
SELDOM  := '/tests?/|/testing/|/transformers/models/|/diffusers/(modular_)?pipelines/|/pygments/lexers/|/(pip|setuptools|fontTools|debugpy|playwright|jedi|torchgen|prompt_toolkit)/|/sympy/(physics|stats|combinatorics|vector|diffgeom)/'
PIP     := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
ifneq ($(words $(VENV)),1)
  $(error make needs a VENV without spaces; this is "$(VENV)")
endif
LABUTILS := $(BIN)/python -m labutils.cli
# Of what pip says: each large download, a line for every 40 packages, and everything where it fails.
SHORTLY := awk -v log_file=$(VENV)/install.log '{ print > log_file } \
  /^Collecting/ && ++n % 40 == 0 { print "  " n " packages found"; fflush() } \
  /^ *Downloading .*\([0-9][0-9][0-9]\.|^ *Downloading .*\([0-9.]+ G/ { print "  downloading " $$2 " " $$3 " " $$4; fflush() } \
  /^Installing collected/ { print "  unpacking " NF - 3 " packages"; fflush() } \
  /^pip ended with/ && $$4 { close(log_file); system("cat " log_file); exit $$4 }'
# What a run leaves in a notebook is taken out: all but the sources, and the metadata that stored notebooks have.
UNRUN   := $(BIN)/python -m jupyter nbconvert --log-level=WARN --inplace --clear-output \
  --ClearMetadataPreprocessor.enabled=True \
  $(addprefix --ClearMetadataPreprocessor.preserve_cell_metadata_mask=,tags lines_to_next_cell) \
  $(addprefix --ClearMetadataPreprocessor.preserve_nb_metadata_mask=,kernelspec jupytext)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv install doctor course test lab lint format notebooks unsloth te trl clean clean-venv

help:
	@sed -n '/^$$/q;s/^# \{0,1\}//p' Makefile

install: venv $(STAMP)

# A sound environment stays, one that `make` itself left broken is made anew, and nothing else is touched. Once its
# folder is renamed or copied, the commands in it still name the old place: there they find another Python or none.
venv:
	@where() { "$$@" --version 2>/dev/null | sed 's/.* from \(.*\) (.*/\1/'; }; \
	if [ "$$(where $(BIN)/pip)" -ef "$$(where $(BIN)/python -m pip)" ]; then exit 0; fi; \
	if [ -e $(VENV) ] && [ ! -e $(OURS) ] && [ ! -e $(STAMP) ]; then \
	  echo "$(VENV) is no Python environment with a pip of its own, and make did not make it. Choose another: make VENV=..." >&2; \
	  exit 2; fi; \
	command -v $(PYTHON) > /dev/null || { \
	  echo "There is no $(PYTHON) here. The course needs Python 3.11 or 3.12: make PYTHON=/path/to/python3.12 ..." >&2; \
	  exit 2; }; \
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1). The course needs Python 3.11 or 3.12: make PYTHON=python3.12 ..." >&2; \
	  exit 2; }; \
	if [ -e $(VENV) ]; then echo "$(VENV) is broken, as by an interrupted installation or a renamed folder: it is made anew."; \
	  rm -rf $(VENV); fi; \
	mkdir -p $(VENV) && touch $(OURS) && $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) could not make $(VENV). On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 2; }

$(STAMP): requirements.txt constraints.txt pyproject.toml
	@echo "Installing PyTorch and what else the course takes into $(VENV): some minutes. In full: $(VENV)/install.log"
	@$(PIP) --upgrade pip > /dev/null 2>&1 || true  # an old one takes much longer to find out which versions fit
	@{ $(PIP) --no-compile -r requirements.txt 2>&1; echo "pip ended with $$?"; } | $(SHORTLY)
	@# On all cores, where pip takes one; without what the course hardly touches. Templates don't compile: || true
	@$(BIN)/python -m compileall -qq -j 0 -x $(SELDOM) $(VENV)/lib || true
	@touch $@ && echo "Installed."

doctor: install
	@$(LABUTILS) doctor

course: install
	@$(LABUTILS) doctor || echo "The labs run all the same: each says what it could not do here."
	@status=0; $(LABUTILS) run --scale $(SCALE) --results "$(RESULTS)" || status=$$?; \
	[ $$status -eq 2 ] || [ $$status -eq 130 ] || { \
	  $(LABUTILS) report --results "$(RESULTS)" > "$(RESULTS)/scoreboard.txt"; echo; \
	  sed -n '/^Summary/,$$p' "$(RESULTS)/scoreboard.txt"; echo; \
	  echo "Every claim and its verdict: $(RESULTS)/scoreboard.txt; with pictures, predictions and what to try next:"; \
	  echo "$(RESULTS)/notebooks/12_scoreboard.ipynb. All executed labs, to read in a browser: $(RESULTS)/index.html"; \
	  echo "Read and change the labs yourself: make lab"; }; \
	exit $$status

test: install
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadscope --no-loadscope-reorder $(ARGS)

lab: install
	@if [ "$$(id -u)$(ARGS)" = 0 ]; then echo "As root, JupyterLab wants: make lab ARGS=--allow-root"; fi
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

unsloth te trl: install
	$(PIP) -c constraints.txt -e '.[$@]'

# Only an environment that `make` made.
clean-venv:
	@if [ -e $(OURS) ]; then rm -rf $(VENV); elif [ -e $(VENV) ]; then echo "make did not make $(VENV): it stays."; fi

clean: clean-venv
	rm -rf build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
