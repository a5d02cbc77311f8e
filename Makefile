# headstart's daily commands; `make` lists them. Everything runs in .venv, which the first command makes.

PYTHON ?= python3
VENV   ?= .venv
# A CPU build of torch by default: small, and enough for the demo and the tests. For a GPU: make demo TORCH=torch
TORCH  ?= cpu
BIN    := $(VENV)/bin
# Which engine the demo runs on: torch, or llama (make demo ENGINE=llama): GGUF, a small install, nothing converted
ENGINE ?= torch
export OMP_WAIT_POLICY = PASSIVE
# Whatever the shell says, what is compiled is kept: else each process that the tests start compiles every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-cluster test test-vllm test-cluster check bench soak trials clean install

help:  ## list the commands
	@grep -hE '^[a-z-]+: .*##|^[a-z-]+:  ##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 12

ifeq ($(ENGINE),llama)
demo: $(VENV)-llama/.installed
	@$(VENV)-llama/bin/headstart demo smollm2-135m-gguf $(DEMO)
else
demo: $(VENV)/.installed  ## the main job on a real model: compute once, kill the server, answer from disk
	@$(BIN)/headstart demo $(DEMO)
endif

demo-cluster: $(VENV)/.installed  ## two servers, one pool on a real MooseFS: what one computes the other hits; one dies (root)
	@$(BIN)/python tests/cluster/demo.py $(DEMO)

test: $(VENV)/.installed  ## all tests that take under ten minutes together
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder $(TESTS)

test-vllm: $(VENV)/.installed  ## the connector under the real vLLM (4 GB to fetch, about a quarter of an hour)
	@sh tests/vllm/run.sh $(BIN) $(TESTS)

test-cluster: $(VENV)/.installed  ## the pool on a real MooseFS, the object tier on a real S3 server, workers on Ray, KV over NIXL: installed and started (root, some minutes)
	$(BIN)/pip install -q 'ray>=2.40' 'nixl-cu12>=1.5'
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m cluster tests/cluster $(TESTS)

check: $(VENV)/.installed  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed  ## the benchmarks whose tables are in docs/benchmarks.md (three quarters of an hour, on a quiet machine)
	$(BIN)/python -m benchmarks $(BENCH)

soak: $(VENV)/.installed  ## long random runs: crashes, faults, state machines
	$(BIN)/python -m pytest -q -m soak --soak $(TESTS)

trials: $(VENV)/.installed  ## the cache under libllama and under the real vLLM (3.5 GB to install, ten minutes)
	@sh trials/run.sh $(BIN)

install: $(VENV)/.installed  ## only make .venv and install everything into it

COMPILED := src/headstart/block/_chain.c src/headstart/policy/routing/_choice.c src/headstart/transfer/_reader.c $(addprefix src/headstart/engine/torch/,_attention.c _attention_tile.h)

$(VENV)/.installed: pyproject.toml Makefile $(COMPILED)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) cannot make a virtual environment; trying to install python3-venv"; rm -rf $(VENV); \
	    apt-get update -qq && apt-get install -y -qq python3-venv && $(PYTHON) -m venv $(VENV); } || { \
	    echo "no virtual environment: install Python 3.11 or newer with its venv module (Debian: python3-venv), then run make again"; exit 3; }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "headstart needs Python 3.11 or newer; say which with: make PYTHON=python3.12 …"; rm -rf $(VENV); exit 3; }
	@echo "installing into $(VENV) (the first time takes some minutes)"
	@if [ "$(TORCH)" = cpu ] && [ "$$(uname)" = Linux ]; then \
	    $(BIN)/pip install -q "torch==2.13.0+cpu" 2>/dev/null \
	    || $(BIN)/pip install -q --index-url https://download.pytorch.org/whl/cpu torch; \
	else $(BIN)/pip install -q "$(subst cpu,torch,$(TORCH))"; fi
	$(BIN)/pip install -q -e '.[torch,llama,test,dev]'
	@touch $@

$(VENV)-llama/.installed: pyproject.toml Makefile
	@test -x $(VENV)-llama/bin/python || $(PYTHON) -m venv $(VENV)-llama || { rm -rf $(VENV)-llama; \
	    echo "$(PYTHON) cannot make a virtual environment; run make install, which tells what is missing"; exit 3; }
	@echo "installing into $(VENV)-llama (some 100 MB, no torch)"
	$(VENV)-llama/bin/pip install -q -e '.[llama]'
	@touch $@

clean:  ## remove .venv and caches, keep models and stored prefixes
	rm -rf $(VENV) $(VENV)-llama build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
