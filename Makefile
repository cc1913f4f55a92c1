# Two commands do all the set-up: `make run` answers a prompt with the embedded model, `make test` proves the engine.
VENV ?= .venv
BIN := $(VENV)/bin
PROMPT ?= A KV cache is like a library. Instead of reserving a whole shelf for every reader, the library lends single pages, and
MINUTES ?= 10
SEED ?= 1

.PHONY: run serve chaos test test-all lint fuzz native native-asan native-emulated clean help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

run:  ## set everything up and answer PROMPT with Gemma 3 270M, showing the block tables used
	@tools/install.sh $(VENV) demo
	@$(BIN)/octavo generate "$(PROMPT)" --n 3 --temperature 0.8 --seed 1 --max-tokens 48 --max-model-len 2048 --show-blocks

serve:  ## set everything up and serve Gemma 3 270M; the block map is at http://127.0.0.1:8000/blocks
	@tools/install.sh $(VENV) demo,server
	@$(BIN)/octavo serve --show-tokens --chat-template plain

chaos: dev  ## a server under attack: clients cut, huge bodies, signals, a broken engine; a table of what survived
	@$(BIN)/python tools/chaos.py

dev:
	@tools/install.sh $(VENV) dev

test: dev lint  ## lint, types, and all tests but the slow ones
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

test-all: dev lint  ## the slow ones too
	@$(BIN)/python -m pytest -m "slow or not slow"

lint: dev  ## ruff and mypy
	@$(BIN)/ruff check src tests tools
	@$(BIN)/ruff format --check src tests tools
	@$(BIN)/mypy

fuzz: dev  ## the whole engine against "the same request alone", MINUTES=10 SEED=1
	@PYTHONPATH=tests $(BIN)/python tools/fuzz.py --minutes $(MINUTES) --seed $(SEED)

native-asan: dev  ## kernel tests under AddressSanitizer and UBSan
	@PATH="$(CURDIR)/$(BIN):$$PATH" tools/native_asan.sh

native-emulated: dev  ## kernel tests of the AVX-512 and AMX variants on a processor without them
	@PATH="$(CURDIR)/$(BIN):$$PATH" tools/native_emulated.sh

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f src/octavo/kernels/cpu/*.so
