# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check browser docs commands code-map test-gpu setup clean

demo: $(READY)  ## trace a fact and draw it
	$(BIN)/factscope demo

test: check browser  ## the whole suite; one thread a worker, since two that compete are slower
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

test-gpu: $(READY)  ## tests that need a CUDA GPU: captured graphs, kernels, static decoding
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -q tests/gpu

check: $(READY)  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

browser:  ## Chromium, which the tests of pages need; Debian's, if there is none yet
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { apt-get update -qq \
	&& DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium chromium-driver; }

docs: $(READY)  ## the documentation as pages, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

commands: $(READY)  ## the reference of the command line, from the commands themselves
	$(BIN)/python docs/tools/commands.py

code-map: $(READY)  ## docs/code-map.md, from the docstrings of all modules
	$(BIN)/python docs/tools/code_map.py

setup: $(READY)  ## .venv with everything for development

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf .venv build demo traces
