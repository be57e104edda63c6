# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
AXE := build/axe/package/axe.min.js
AXE_SHA256 := 20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878

.PHONY: demo test suite check style types browser docs commands code-map test-gpu test-lowest setup clean

demo: $(READY)  ## trace a fact and draw it
	$(BIN)/factscope demo

test: style browser  ## style, types and the whole suite
	$(MAKE) --no-print-directory -j2 types suite

suite: $(READY)  ## all tests but those of a GPU; one thread a worker, since two that compete are slower
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

test-gpu: $(READY)  ## tests that need a CUDA GPU: captured graphs, kernels, static decoding
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -q tests/gpu

# The lowest versions that pyproject.toml allows, except torch: its old builds for CPUs are not on
# PyPI. Shapes are not checked and warnings are no errors, since old packages support neither.
LOWEST ?= build/lowest
CORE := $(addprefix tests/, test_settings.py test_records.py test_io.py test_packaging.py cli/test_app.py \
	cli/test_check.py data/test_facts_files.py lm/test_load.py lm/test_tokens.py tracing/test_trace.py \
	editing/test_edit_file.py editing/test_rome.py report/test_figures.py report/test_html.py \
	runs/test_folder.py serve/test_routes.py \
	runs/test_evaluate.py::test_records_from_ray_are_the_same_even_if_an_actor_dies)

test-lowest:  ## core tests with the lowest versions that pyproject.toml allows
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install -q uv
	$(LOWEST)/bin/uv pip compile -q --resolution lowest-direct --extra ray --extra serve \
	--python $(LOWEST)/bin/python -c constraints.txt pyproject.toml -o $(LOWEST)/versions.txt
	$(LOWEST)/bin/python -m pip install -q -c $(LOWEST)/versions.txt -e ".[ray,serve]" beartype hatchling httpx peft pytest selenium
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -q -p no:cacheprovider \
	-o addopts=--import-mode=importlib -o filterwarnings=default $(CORE)

check: style types  ## style and types

style: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/pyright

browser: $(AXE)  ## Chromium, which the tests of pages need (Debian's, if there is none yet), and axe-core
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { apt-get update -qq \
	&& DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium chromium-driver; }

$(AXE):  # axe-core checks the page's accessibility
	@command -v npm >/dev/null || { apt-get update -qq \
	&& DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends npm; }
	mkdir -p build/axe && cd build/axe && npm pack --silent axe-core@4.14.0 | xargs tar xzf
	echo "$(AXE_SHA256)  $(AXE)" | sha256sum --check --quiet || { rm -f $(AXE); exit 1; }
	touch $(AXE)

docs: $(READY)  ## the documentation as pages, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

commands: $(READY)  ## the reference of the command line, from the commands themselves
	$(BIN)/python docs/tools/commands.py

code-map: $(READY)  ## docs/code-map.md, from the docstrings of all modules
	$(BIN)/python docs/tools/code_map.py

setup: $(READY)  ## .venv with everything for development

# uv is several times as fast as pip, but does not read pip's configuration.
DEV := -c constraints.txt -e ".[dev]"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	{ $(BIN)/python -m pip install -q uv && $(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python $(DEV); } \
	|| $(BIN)/python -m pip install -q $(DEV)
	touch $(READY)

clean:
	rm -rf .venv build demo traces
