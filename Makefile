# Everything runs from .venv, which `make install` makes and keeps up to date.
SHELL := /usr/bin/env bash
PYTHON ?= python3
VENV := $(or $(PULLFILL_VENV),.venv)
BIN := $(VENV)/bin
ARGS ?=
PYTEST_ARGS ?=
# Benchmark tests need no engine, but `make test-fast` is to take a minute at most.
ENGINE_TESTS := $(wildcard benchmarks/tests tests/integration tests/chaos tests/netns tests/gpu)
# Processes that run engine tests. They wait for half of the time, so more than cores.
WORKERS ?= 3
# How often `make flaky` runs its tests.
N ?= 10
# Without bytecode on disk, every process of a run would compile all it imports again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install install-nixl install-bench up down status test test-vllm test-fast spine zoo flaky lint format chaos chaos-report soak sim sim-splits sim-fleet bench bench-quick clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## Make .venv and install everything into it (quick when nothing changed)
	@$(PYTHON) -m pullfill.deploy.install

install-nixl: install ## Add NIXL (UCX) to .venv: the nixl transport, 240 MB
	$(BIN)/python -m pip install --no-deps "nixl>=1.5" "nixl-cu13>=1.5"

install-bench: install ## Add guidellm, for bench-rates, beside .venv: 350 MB
	$(BIN)/python -m benchmarks.bench_rates --install

up: install ## Start a cluster here: make up [MODEL=PATH] [ARGS="--decode 2 ..."]
	@exec $(BIN)/pullfill up $(if $(MODEL),--model $(MODEL)) $(ARGS)

down: ## Stop the cluster that runs from .pullfill/
	@exec $(BIN)/pullfill down $(ARGS)

status: ## Show the cluster that runs from .pullfill/
	@exec $(BIN)/pullfill status $(ARGS)

lint: install ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: install ## Lint, and all tests but the long ones, quick ones first
	@$(MAKE) --no-print-directory -j2 lint test-fast  # mypy uses one core
	$(BIN)/pytest -q --forks $(WORKERS) -m "not long" $(ENGINE_TESTS) $(PYTEST_ARGS)

# vLLM keeps what it learns about a model, in 10 s of CPU, and each release overwrites the others'.
test-vllm: ## make test on another release of vLLM, in a venv of its own: make test-vllm VLLM=0.31.0
	@PULLFILL_VLLM=$(or $(VLLM),$(error name the release: make test-vllm VLLM=0.31.0)) \
	PULLFILL_VENV=.venv-vllm-$(VLLM) VLLM_CACHE_ROOT=$(CURDIR)/.venv-vllm-$(VLLM)/cache $(MAKE) test

test-fast: install ## Unit and contract tests, in eight forked processes
	$(BIN)/pytest -q --forks 8 tests/unit tests/contract $(PYTEST_ARGS)

spine: install ## Record one remote prefill in a real cluster: its files and functions, in order
	$(BIN)/python -m tests.spine $(ARGS)

zoo: install ## Tiny models of each architecture: a cluster answers as one engine (minutes)
	$(BIN)/python -m tests.zoo $(ARGS)

flaky: install ## Repeat tests, count what failed: make flaky N=10 [ARGS="tests/chaos"]
	for i in $$(seq $(N)); do $(BIN)/pytest -q $(or $(ARGS),--forks $(WORKERS) -m "not long"); done \
	| grep -E "^(FAILED|ERROR)|[0-9] passed" | sed -E "s/ - .*| in [0-9.]+s.*//" | sort | uniq -c

chaos: install ## Fault tests and models, also with stock vLLM, and all long tests: LoRA, packaging, chart, more fuzzing
	$(BIN)/pytest tests/chaos $(PYTEST_ARGS)
	STOCK="decode prefill" $(BIN)/pytest tests/chaos/test_{handoff_faults,worker_faults,server_faults,migration,outages}.py $(PYTEST_ARGS)
	STOCK=prefill $(BIN)/pytest tests/chaos/test_worker_faults.py $(PYTEST_ARGS)
	STOCK="decode prefill" $(BIN)/pytest tests/integration/test_models.py $(PYTEST_ARGS) \
	-k "(Llama and not fp8 or Qwen3-MoE or DeepSeek or Gemma) and not ranks"
	$(BIN)/pytest -m long tests/integration tests/netns benchmarks/tests $(PYTEST_ARGS)
	FUZZ=1000 $(BIN)/pytest -q --forks 2 tests/unit tests/contract tests/integration -k "fuzz or any_order_of_events or many_connects or hypothesis"

chaos-report: install ## One process killed under load: failures, recovery, freed blocks (10 minutes)
	$(BIN)/python -m benchmarks.chaos_report $(ARGS)

soak: install ## Mixed faults under load: make soak [ARGS="--minutes 10 --seed 1"]
	$(BIN)/python -m benchmarks.chaos_soak $(ARGS)

sim: install ## Simulate where prompts are prefilled: the policy cost against thresholds (minutes)
	$(BIN)/python -m benchmarks.sim --save

sim-splits: install ## Simulate workers with both sides beside static splits (minutes)
	$(BIN)/python -m benchmarks.sim_splits --save

sim-fleet: install ## Simulate 8, 64 and 1,000 GPU workers with both sides (minutes)
	$(BIN)/python -m benchmarks.sim_fleet --save

bench: install-nixl ## Serving beside aggregated vLLM, NIXL and others: all of it (30 minutes)
	$(BIN)/python -m benchmarks.bench_serving --save $(ARGS)

bench-quick: install ## The same in short (8 minutes)
	$(BIN)/python -m benchmarks.bench_serving --quick --name serving-quick --save $(ARGS)

# Most write benchmarks/results/NAME.md; ARGS=--help tells what each measures.
bench-cluster: ## Start-up, memory, handoff stages and idle CPU of a demo cluster (minutes)
bench-control: ## CPU and latency of the control plane, 1 to 16 mock workers (minutes)
bench-decode-policy: ## A trace on two decode workers, by the choice of the worker (15 minutes)
bench-flag: ## A decode worker in stock vLLM beside one of our own (3 minutes)
bench-fetch: ## Prefixes read from another decode worker against computing them again (minutes)
bench-paths: ## What a long prompt costs the streams and itself, by hop and by thread (minutes)
bench-rates: install-bench ## Goodput at rising rates, measured by guidellm (15 minutes)
bench-splits: ## Workers with both sides on beside static splits and plain vLLM (35 minutes)
bench-transfer: ## KV transfers against plain copies and sockets (minutes)
bench-gpu: ## KV blocks between GPU memories against device copies (needs a GPU)
bench-gpu: override ARGS := $(or $(ARGS),--parts all) --save

bench-%: install
	$(BIN)/python -m benchmarks.bench_$(subst -,_,$*) $(ARGS)

format: install ## Put the code into ruff's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv, caches and build leftovers
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
