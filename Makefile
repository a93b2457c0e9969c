# Few verbs, the same for people and for CI. They need g++, make and Python >= 3.11 with venv, no root, and install
# everything else into .venv by pip.

PYTHON    ?= python3
# Which torch. The range is the one of pyproject.toml; narrow it to choose a build.
TORCH     ?= torch>=2.11,<2.14
# Which of the Python tests `make test` runs: a pytest mark expression, as in `make python-test MARKS=slow`. PYTEST_ARGS
# goes behind it, as in PYTEST_ARGS='-k broadcast'.
MARKS     ?= not slow and not thorough
PYTEST_ARGS ?=
# Inputs per fuzz target.
FUZZ_RUNS ?= 1000000
# Schedules that `make check-views` runs, and the seed of the first.
SCHEDULES ?= 1000000
SEED ?= 1
# What `make soak` runs: random collectives, in each of four worlds, and ranks killed in the midst of others.
COLLECTIVES ?= 100000
KILLS ?= 50
# Of recompute: random jobs, and from which kinds of program they are drawn; empty is all.
JOBS ?= 200
KINDS ?=
# Where `make bench` writes. Results worth keeping are copied from there to papers/benchmarks/ and committed.
BENCH_OUT ?= build/bench

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo results docs wheel test test-thorough test-all lint coverage coverage-engine coverage-python bench bench-lab bench-bursts bench-long bench-colocate bench-convergence bench-rarely bench-coding fuzz sanitize stub clean engine-build engine-test engine-virtual engine-clocked address-test thread-build driver-test views-test check-views soak recompute survey python-test python-pure python-clocked python-all stub-check

SHELL := /bin/bash
BIN := .venv/bin
# pip's cmake and ninja come first, so that every machine builds with the same ones.
export PATH := $(CURDIR)/$(BIN):$(PATH)

CPP := $(wildcard $(foreach folder,engine engine/* engine/tests/*,$(folder)/*.cpp $(folder)/*.hpp))
ENGINE := $(filter-out engine/tests/% engine/fuzz/%,$(CPP))
CPP_FILES := $(CPP) $(wildcard papers/benchmarks/*.cpp)
# ninja would try to join make's jobserver, which only recipes of a sub-make can reach, and print an error.
BUILD := env -u MAKEFLAGS cmake --build

help:  ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- the environment -------------------------------------------------------------------------------------------------

# What builds the engine. Listed again in pyproject.toml; --check-build-dependencies below notices if the two disagree.
.venv/.tools: Makefile
	@echo "making .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq 'scikit-build-core>=1.1,<2' 'nanobind>=3.1,<4' cmake ninja
	@touch $@

# torch alone and first: packages that ask for any torch must find this one and not fetch another.
.venv/.torch: .venv/.tools
	@echo "installing $(TORCH): some hundred MB the first time"
	@$(BIN)/python -m pip install -qq '$(TORCH)'
	@touch $@

# Editable: Python is read from src/ as it is, and this stamp rebuilds the module when the engine changes. (Rebuilding at
# import instead would have all ranks of a job build at once.) The kept build directory recompiles only what changed.
.venv/.installed: .venv/.torch pyproject.toml lab/pyproject.toml CMakeLists.txt $(ENGINE) $(sort $(dir $(ENGINE)))
	@echo "building stormtorch"
	@$(BIN)/python -m pip install -qq --no-build-isolation --check-build-dependencies \
		--config-settings=build-dir=build/python --editable '.[dev]'
	@$(BIN)/python -m pip install -qq --no-build-isolation --check-build-dependencies --no-deps \
		--config-settings=build-dir=$(CURDIR)/build/python-lab --editable ./lab
	@touch $@

setup: .venv/.installed  ## make .venv and build stormtorch into it (the other verbs do it by themselves)

# --- use it ----------------------------------------------------------------------------------------------------------

demo: setup  ## see what it is for: a race against DDP on gloo under 10 % loss, under three minutes on two cores
	$(BIN)/stormtorch demo

# PARTS chooses some, as in `make bench PARTS=allreduce,cable`. What needs a lab or MPI is left out where there is none.
PARTS ?=
bench: setup  ## measure all-reduce, latency, steps, cable, lab, hierarchy and MPI beside gloo (PARTS=...); writes build/bench/*
	$(BIN)/stormtorch bench all --out $(BENCH_OUT) $(if $(PARTS),--only $(PARTS))

# With root, or where users may make namespaces. Bounded: about 25 minutes on two cores, most of them TCP's.
BENCH_LAB = $(BIN)/stormtorch bench allreduce --ranks 4 --iters 10
bench-lab: setup  ## measure all-reduce and training beside gloo under real loss, in the network lab; writes build/bench/lab-*
	@mkdir -p $(BENCH_OUT)
	@set -e; measure() { $(BENCH_LAB) "$${@:2}" --json $(BENCH_OUT)/lab-$$1.json --plot $(BENCH_OUT)/lab-$$1.png; }; \
	measure 400mbit --rate 400mbit --mb 25 --loss 0; \
	measure 400mbit-loss10 --rate 400mbit --mb 25 --loss 0.1 --patience-s 20; \
	measure 1gbit-loss10 --rate 1gbit --mb 25 --loss 0.1 --patience-s 20; \
	measure 100mbit-40ms-loss10 --rate 100mbit --delay 20ms --mb 5 --loss 0.1 --patience-s 40; \
	$(BIN)/stormtorch bench ddp --ranks 4 --rate 400mbit --loss 0.1 --iters 10 --patience-s 60 \
		--params-m 10 --steps 4 --wire float32,bfloat16,int8 \
		--json $(BENCH_OUT)/lab-ddp-400mbit-loss10.json --plot $(BENCH_OUT)/lab-ddp-400mbit-loss10.png; \
	$(MAKE) --no-print-directory bench-convergence; \
	$(BIN)/stormtorch bench sweep --ranks 4 --rates 100mbit,400mbit --delays 0ms,20ms --losses 0,0.01,0.1 \
		--ideal-s 0.4 --iters 5 --patience-s 6 --json $(BENCH_OUT)/lab-sweep.json --plot $(BENCH_OUT)/lab-sweep.png; \
	$(BIN)/stormtorch bench manners --json $(BENCH_OUT)/lab-manners.json

bench-coding: build/bench-coding/build.ninja  ## measure the erasure code, beside ISA-L if libisal-dev is installed; writes build/bench/coding.json
	@$(BUILD) build/bench-coding --target bench_coding
	@mkdir -p $(BENCH_OUT)
	build/bench-coding/bench_coding $(BENCH_OUT)/coding.json

# About half an hour on two cores. Bursts of packets and of time: a sender that waits leaves only the second.
BURSTS ?= 8,20,64,5ms
bench-bursts: setup  ## measure all-reduce under bursts of loss, exact and lossy, 4 and 6 hosts (BURSTS=8,20,5ms); writes build/bench/lab-bursts-*
	@mkdir -p $(BENCH_OUT)
	@set -e; for ranks in 4 6; do for rate in 100mbit 400mbit; do \
		$(BIN)/stormtorch bench sweep --ranks $$ranks --rates $$rate --delays 0ms --losses 0.05,0.1,0.2 \
			--bursts $(BURSTS) --backends storm,storm-lossy --ideal-s 0.4 --iters 11 --patience-s 10 \
			--json $(BENCH_OUT)/lab-bursts-$$ranks-$$rate.json --plot $(BENCH_OUT)/lab-bursts-$$ranks-$$rate.png; \
	done; done

# About eight minutes, ten of endurance and six of comparison. Needs nginx.
COLOCATE = $(BIN)/stormtorch bench colocate
bench-colocate: setup  ## measure a web service beside a training, in the network lab; writes build/bench/lab-colocate-*
	@mkdir -p $(BENCH_OUT)
	$(COLOCATE) --slack 2.2 --prefer equal,0.05 --requests 200 --steps 40 --seconds 20 --train model-averaging --seeds 3 \
		--json $(BENCH_OUT)/lab-colocate-seeds.json --plot $(BENCH_OUT)/lab-colocate-seeds.png
	$(COLOCATE) --slack 2.6 --prefer equal,0.05 --requests 200 --steps 24 --seconds 15 --tcp cubic \
		--train model-averaging,lead,ddp,ddp-low,none \
		--json $(BENCH_OUT)/lab-colocate-trainings.json --plot $(BENCH_OUT)/lab-colocate-trainings.png
	$(COLOCATE) --slack 2.6 --prefer 0.05 --requests 100 --steps 40 --seconds 600 --train lead \
		--json $(BENCH_OUT)/lab-colocate-endurance.json

# About three minutes.
bench-long: setup  ## measure all-reduce over long, lossy paths, exact and lossy; writes build/bench/lab-long-*
	@mkdir -p $(BENCH_OUT)
	@set -e; measure() { $(BIN)/stormtorch bench allreduce --backends storm,storm-lossy --iters 15 --patience-s 40 "$${@:2}" \
		--json $(BENCH_OUT)/lab-long-$$1.json; }; \
	measure 100mbit-40ms-loss10 --ranks 4 --rate 100mbit --delay 20ms --loss 0.1 --mb 5; \
	measure 50mbit-80ms-loss23 --ranks 3 --rate 50mbit --delay 40ms --loss 0.23 --mb 5; \
	measure 20mbit-150ms-loss3 --ranks 4 --rate 20mbit --delay 75ms --loss 0.03 --mb 1

bench-convergence: setup  ## the part of bench-lab that trains to the same loss; writes build/bench/lab-convergence-*
	@mkdir -p $(BENCH_OUT)
	$(BIN)/stormtorch bench convergence --ranks 4 --rate 400mbit --loss 0.1 --seconds 60 --backends gloo-cubic,gloo-bbr,storm-drift \
		--json $(BENCH_OUT)/lab-convergence-400mbit-loss10.json --plot $(BENCH_OUT)/lab-convergence-400mbit-loss10.png

bench-rarely: setup  ## who comes to a loss first at 20 Mbit/s, 100 ms and 5 % loss: rare exchanges, every step, gloo; half an hour
	@mkdir -p $(BENCH_OUT)
	$(BIN)/stormtorch bench convergence --ranks 4 --rate 20mbit --delay 50ms --loss 0.05 --seconds 180 --every-s 12 \
		--layers 3 --width 128 --batch 8 --wire float32 --target 2.4 --timeout-s 900 --patience-s 150 \
		--backends storm-drift,diloco,streaming-diloco,sparse-diloco,gloo-bbr,gloo-cubic \
		--every 30 --set outer_lr=1 --set momentum=0.5 --set block=1024 \
		--json $(BENCH_OUT)/lab-rarely-20mbit-100ms-loss5.json --plot $(BENCH_OUT)/lab-rarely-20mbit-100ms-loss5.png

# Computes nothing: what an experiment computes, and how, stands in papers/experiments/README.md.
results: setup  ## draw all pictures of papers/experiments/results from their JSON, print their tables, and write them into papers/results.md
	@set -e; for kept in papers/experiments/results/*.json; do name=$$(basename $$kept .json); \
		if [ -f papers/experiments/$$name.py ]; then echo "== $$name"; $(BIN)/python papers/experiments/$$name.py --draw; fi; done
	@$(BIN)/python papers/experiments/page.py

# Installs an extra of pyproject.toml alone, without building stormtorch again.
.venv/.extra-%: .venv/.installed
	@echo "installing what '$*' needs"
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"], sep="\n")' \
		| $(BIN)/python -m pip install -qq --requirement /dev/stdin
	@touch $@

# Strict: a broken link or an anchor that is gone is an error. (Not --quiet, which hides warnings from strict, too.)
docs: setup .venv/.extra-docs  ## build the docs site into build/site; warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

# For this machine's architecture and Python. auditwheel gives it the lowest manylinux tag that its symbols allow.
wheel: setup .venv/.extra-release  ## build both wheels into dist/ and try them where there is no compiler
	@rm -rf build/wheels
	@$(BIN)/python -m pip wheel -qq --no-build-isolation --no-deps --config-settings=build-dir=build/wheel \
		--wheel-dir build/wheels .
	@$(BIN)/python -m pip wheel -qq --no-build-isolation --no-deps --config-settings=build-dir=$(CURDIR)/build/wheel-lab \
		--wheel-dir build/wheels ./lab
	@for wheel in build/wheels/*.whl; do $(BIN)/auditwheel repair --wheel-dir dist $$wheel; done
	@$(BIN)/python tests/helpers/check_wheel.py dist

# --- check it --------------------------------------------------------------------------------------------------------

# Three tiers: what people run before they commit, what CI adds to it, and what runs before a release, where sanitizers take
# the place of the plain build.
# Compilers run beside pip, and the engine's tests, which run in virtual time, beside the Python tests that need no clock.
test:  ## the engine's tests with assertions, and the quick Python tests of every folder
	@$(MAKE) --no-print-directory --jobs=2 engine-build setup
	@$(MAKE) --no-print-directory --jobs=2 engine-virtual python-pure
	@$(MAKE) --no-print-directory engine-clocked python-clocked

test-thorough: setup  ## what CI runs after `make test`: the model checker of views, and the Python tests that are thorough but not slow
	@$(MAKE) --no-print-directory --jobs=2 views-test python-pure MARKS='thorough and not slow'
	@$(MAKE) --no-print-directory python-clocked MARKS='thorough and not slow'

test-all: sanitize python-all  ## the engine's tests under ASan+UBSan and TSan, and all Python tests, slow ones too
sanitize: address-test driver-test  ## the engine's tests under ASan+UBSan and under TSan

# Only the first configure is ours: the build itself notices changes of CMakeLists.txt and new files.
build/%/build.ninja: Makefile | .venv/.tools
	@cmake -S . -B build/$* -G Ninja $(CONFIGURE) >/dev/null

# Optimised a little, and with all assertions: quick to compile, and quick enough to run.
build/tests/build.ninja: CONFIGURE = -DSTORM_TESTS=ON -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS='-O1 -D_GLIBCXX_ASSERTIONS'
build/address/build.ninja: CONFIGURE = -DSTORM_TESTS=ON -DSTORM_SANITIZE=address,undefined
build/thread/build.ninja: CONFIGURE = -DSTORM_TESTS=ON -DSTORM_SANITIZE=thread
build/bench-coding/build.ninja: CONFIGURE = -DSTORM_BENCH=ON
build/fuzz/build.ninja: CONFIGURE = -DSTORM_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++

engine-test: engine-virtual engine-clocked views-test
engine-virtual: engine-build
	build/tests/engine_tests -test_driver
# Up to three that failed run once more, alone, as python-test does. A crash leaves no last line, and is a failure at once.
CLOCKED = build/tests/engine_tests
engine-clocked: engine-build
	@$(CLOCKED) test_driver | tee build/tests/clocked.log; status=$${PIPESTATUS[0]}; [ $$status = 0 ] && exit; \
	grep -Eq ' passed, [1-3] failed$$' build/tests/clocked.log && echo "== what failed runs once more, alone" && \
		$(CLOCKED) $$(sed -n 's/^FAILED //p' build/tests/clocked.log)

engine-build: build/tests/build.ninja
	@$(BUILD) build/tests --target engine_tests

# Random schedules of everything that can happen to those who agree on views, some seconds of them; and the three mistakes
# that these must find.
views-test: build/tests/build.ninja
	@$(BUILD) build/tests --target check_views check_views_bugs
	build/tests/check_views --schedules 20000
	@set -e; for bug in majority answers commit; do build/tests/check_views_bugs --bug $$bug; done

check-views: build/tests/build.ninja  ## SCHEDULES random schedules (1,000,000) of the agreement on views, from SEED on
	@$(BUILD) build/tests --target check_views
	build/tests/check_views --schedules $(SCHEDULES) --seed $(SEED)

soak: setup  ## COLLECTIVES random collectives (100,000) by shared memory, datagrams and hosts, bit for bit; KILLS ranks killed (50)
	$(BIN)/python tests/helpers/soak.py --collectives $(COLLECTIVES) --seed $(SEED)
	$(BIN)/python tests/helpers/soak_kills.py --kills $(KILLS) --seed $(SEED)

recompute: setup  ## JOBS random jobs (200) with deaths, returns, joins, leaves and pauses, each recomputed in one process (KINDS=, SEED=)
	$(BIN)/python tests/helpers/recompute.py --jobs $(JOBS) --seed $(SEED) $(if $(KINDS),--kinds $(KINDS))

# Of timm and pytorch_optimizer only if they are installed, as make setup does not: what papers/benchmarks/survey.json has of them stays.
survey: setup  ## all optimizers and idioms of training loops beside one process, a quarter of an hour; writes papers/benchmarks/survey.json, docs/optimizers.md
	$(BIN)/python tests/helpers/survey.py --write docs/optimizers.md

# The driver's tests look at the clock and have threads; all others run in virtual time or in none. So these may share
# the cores with a compiler, and the driver's have them alone; and only the driver's can have races to find.
ADDRESS_TESTS = UBSAN_OPTIONS=print_stacktrace=1 build/address/engine_tests
address-test: build/address/build.ninja
	@$(BUILD) build/address --target engine_tests check_views check_views_bugs
	$(ADDRESS_TESTS) -test_driver
	build/address/check_views --schedules 3000
	@set -e; for bug in majority answers commit; do build/address/check_views_bugs --bug $$bug; done

# setarch: TSan of older compilers cannot place its shadow where the kernel randomises addresses by more than 28 bits.
# Containers may forbid it; the plain run is then the one to try.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)
driver-test: thread-build address-test | $(filter lint,$(MAKECMDGOALS))
	$(ADDRESS_TESTS) test_driver
	$(FIXED_ADDRESSES) build/thread/engine_tests test_driver

# Instrumented by gcov; atomic counts, as the driver has threads.
build/gcov/build.ninja: CONFIGURE = -DSTORM_TESTS=ON -DCMAKE_BUILD_TYPE=None \
	-DCMAKE_CXX_FLAGS='-O1 --coverage -fprofile-update=atomic'

thread-build: build/thread/build.ninja
	@$(BUILD) build/thread --target engine_tests

# Tests share the cores, two at a time; those that compare times, and slow ones, get them one by one. Exit code 5: none was
# chosen.
python-test: python-pure
	@$(MAKE) --no-print-directory python-clocked
# A machine that is busy with something else can make a test miss its time. So up to ten tests that failed run once more,
# alone: a fault fails again, and the first failure stays on the screen.
few_failed = $(BIN)/python -c 'import json; exit(len(json.load(open(".pytest_cache/v/cache/lastfailed"))) > 10)'
again = { status=$$?; [ $$status = 5 ] || { [ $$status = 1 ] && $(few_failed) && \
	echo "== what failed runs once more, alone" && \
	$(BIN)/python -m pytest -m '($(1)) and ($(MARKS))' --last-failed --last-failed-no-failures none $(PYTEST_ARGS); }; }
pytest = $(BIN)/python -m pytest -m '($(1)) and ($(MARKS))' $(2) --cache-clear $(PYTEST_ARGS) || $(call again,$(1))
# A worker keeps to one part of the tests, in order, until it has no more: files that share something make it once.
SHARED := -n 2 --dist worksteal
ALONE := alone or slow
python-pure: setup
	$(call pytest,pure,$(SHARED))
python-clocked: setup
	$(call pytest,not pure and not ($(ALONE)),$(SHARED))
	$(call pytest,not pure and ($(ALONE)))

python-all: setup
	@$(MAKE) --no-print-directory python-test MARKS='slow or not slow'

coverage: coverage-engine coverage-python  ## which lines tests reach, of Python and of the engine; writes build/coverage (PYTEST_ARGS=)

# A test that fails changes little of what is covered: the figures come all the same, and the verb fails at the end. Tests
# take several times as long, and have the longer time limit; those that compare times may fail.
coverage-python: setup
	@rm -rf build/coverage/data build/coverage/python && mkdir -p build/coverage/data
	@status=0; $(BIN)/coverage run -m pytest --timeout 600 -m '$(MARKS)' $(PYTEST_ARGS) || status=$$?; \
	$(BIN)/coverage combine -q && $(BIN)/coverage html -q -d build/coverage/python && \
	$(BIN)/coverage report > build/coverage/python.txt && tail -n 1 build/coverage/python.txt && \
	echo "open build/coverage/python/index.html" && exit $$status

coverage-engine: build/gcov/build.ninja setup
	@cmake --build build/gcov --target engine_tests check_views
	@find build/gcov -name '*.gcda' -delete && mkdir -p build/coverage/engine
	@find build/gcov -name '*.gcno' | while read -r file; do \
		source=$${file#*.dir/}; [ -f "$${source%.gcno}" ] || rm "$$file"; done  # of sources that have moved since
	@status=0; build/gcov/engine_tests || status=$$?; build/gcov/check_views --schedules 1000 || status=$$?; \
	$(BIN)/gcovr --root . --object-directory build/gcov --filter engine/ --exclude engine/tests/ --txt build/coverage/engine.txt \
		--html-details build/coverage/engine/index.html --gcov-ignore-errors all --merge-mode-functions separate && \
	grep '^TOTAL' build/coverage/engine.txt && echo "open build/coverage/engine/index.html" && exit $$status

lint: setup stub-check  ## ruff, mypy, import-linter and clang-format; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

# mypy cannot look into a native module: its types stand in a stub made from the module itself.
STUBS := src/stormtorch/_engine.pyi lab/stormtorch_lab/_engine.pyi
module_of = $(patsubst %/_engine.pyi,%._engine,$(patsubst src/%,%,$(patsubst lab/%,%,$(1))))
make_stub = $(BIN)/python -m nanobind.stubgen -q -m $(call module_of,$(1)) -o $(2) && \
	$(BIN)/ruff check --quiet --fix $(2) && $(BIN)/ruff format --quiet $(2)

stub: setup  ## write the type stubs of the native modules, after a change of the bindings
	@$(foreach stub,$(STUBS),$(call make_stub,$(stub),$(stub)) &&) true

stub-check: setup
	@mkdir -p build/stub
	@set -e; $(foreach stub,$(STUBS),$(call make_stub,$(stub),build/stub/_engine.pyi); \
	diff -u $(stub) build/stub/_engine.pyi || { echo "$(stub) does not match the bindings: run 'make stub'"; exit 1; };)

fuzz:  ## FUZZ_RUNS inputs (1,000,000) into every parser, with clang's libFuzzer
	@command -v clang++ >/dev/null || { echo "fuzzing needs clang: apt-get install clang"; exit 1; }
	@$(MAKE) --no-print-directory build/fuzz/build.ninja
	@$(BUILD) build/fuzz
	@set -e; for target in build/fuzz/fuzz_*; do \
		corpus=build/fuzz/corpus/$${target##*/}; mkdir -p $$corpus; \
		echo "$$target, $(FUZZ_RUNS) inputs"; \
		$$target -runs=$(FUZZ_RUNS) -timeout=10 -verbosity=0 -print_final_stats=1 -artifact_prefix=build/fuzz/ $$corpus; \
	done

clean:  ## remove what was built; .venv stays (rm -rf .venv removes that too)
	rm -rf build dist .venv/.installed .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
