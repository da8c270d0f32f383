# The one task list. `make` or `make help` shows it. A step that has nothing to do does nothing: what was
# done is remembered in build/stamps, by the files that it was made from.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMPS := build/stamps
STEP := scripts/step
SUDO_KEEPS := PATH,CARGO_HOME,RUSTUP_HOME,CI
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo --preserve-env=$(SUDO_KEEPS))

SANDBOXD_SOURCES := Cargo.toml Cargo.lock $(shell find crates/sandboxd -name '*.rs' -o -name Cargo.toml)
ENGINE_SOURCES := Cargo.toml Cargo.lock \
    $(shell find crates/engine -name '*.rs' -o -name '*.py' -o -name '*.pyi' -o -name '*.toml')

##@ Use
.PHONY: quickstart
quickstart: setup ## Set everything up and run the main job end to end
	@$(SUDO) $(BIN)/agent-sandbox quickstart

.PHONY: setup
setup: $(STAMPS)/python ## Install what is missing: system packages, virtual environment, daemon, engine
	@:

$(STAMPS)/system: scripts/setup-system scripts/find-python Cargo.toml
	@$(STEP) "System packages" "See above for what to install, then run make again." scripts/setup-system
	@mkdir -p $(@D) && touch $@

$(STAMPS)/venv: | $(STAMPS)/system
	@$(STEP) "Virtual environment $(VENV)" "Remove $(VENV) and run make again." \
	    bash -c 'test -x $(BIN)/python || "$$(scripts/find-python)" -m venv $(VENV)'
	@mkdir -p $(@D) && touch $@

$(STAMPS)/sandboxd: scripts/build-sandboxd $(SANDBOXD_SOURCES) $(STAMPS)/system
	@$(STEP) "Daemon (Rust, a minute or two the first time)" "If it is the network, run make again." scripts/build-sandboxd
	@mkdir -p $(@D) && touch $@

$(STAMPS)/maturin: constraints.txt | $(STAMPS)/venv
	@$(STEP) "maturin" "If it is the network, run make again." \
	    $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt maturin
	@mkdir -p $(@D) && touch $@

$(STAMPS)/engine: $(ENGINE_SOURCES) $(STAMPS)/sandboxd $(STAMPS)/maturin
	@$(STEP) "Engine (Rust, a minute or two the first time)" "If it is the network, run make again." \
	    env "PATH=$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --disable-pip-version-check \
	    --force-reinstall --no-deps --no-build-isolation ./crates/engine
	@mkdir -p $(@D) && touch $@

$(STAMPS)/python: pyproject.toml constraints.txt $(STAMPS)/engine
	@$(STEP) "Python packages" "If it is the network, run make again." \
	    $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[server,cli,dev]'
	@mkdir -p $(@D) && touch $@

##@ Develop
$(STAMPS)/lint-tools: $(STAMPS)/system
	@$(STEP) "Rust's formatter and linter" "See above for what to install, then run make again." \
	    scripts/setup-system cargo-fmt cargo-clippy
	@touch $@

$(STAMPS)/bench-tools: $(STAMPS)/system
	@$(STEP) "mmdebstrap" "See above for what to install, then run make again." scripts/setup-system mmdebstrap
	@touch $@

$(STAMPS)/store-bench-tools: $(STAMPS)/system
	@$(STEP) "restic, borg and git" "See above for what to install, then run make again." \
	    scripts/setup-system git restic borgbackup
	@touch $@

$(STAMPS)/test-tools: $(STAMPS)/system
	@$(STEP) "What the tests need" "See above for what to install, then run make again." \
	    scripts/setup-system skopeo umoci vim-tiny procps runsc bubblewrap docker.io qemu-system-x86 erofs-utils \
	    mmdebstrap busybox-static
	@touch $@

JOBS ?= $(shell echo $$(($$(nproc) + 1)))

.PHONY: test
test: setup $(STAMPS)/test-tools ## Run every test (root), in parts, JOBS at a time; PARTS="unit rust" runs only those
	@$(if $(SUDO),cargo test --locked --workspace --quiet --no-run)
	@$(SUDO) $(BIN)/python scripts/run_tests.py --jobs $(JOBS) $(PARTS)

.PHONY: test-fast
test-fast: setup $(STAMPS)/test-tools ## Run the Python tests that need neither root nor a runtime
	$(BIN)/python -m pytest -m "not real"

.PHONY: explore
explore: setup ## Run the property tests with other random examples than the usual ones
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -q $$(grep -rl --include='test_*.py' '^from hypothesis' tests/unit)

FUZZ_SECONDS ?= 30
FUZZ_SEED ?= 1

.PHONY: fuzz
fuzz: setup ## Feed the wire's two sides and the store with broken bytes: FUZZ_SECONDS (30) each, from FUZZ_SEED (1)
	@$(STEP) "Fuzzers of the Rust sides" "See the errors above." cargo build --locked --profile engine \
	    --package sandboxd --example fuzz-wire --package agent-sandbox-engine --example fuzz-store
	@printf '%s\n' "$(BIN)/python -m tests.fuzz.wire" "$(BIN)/python -m tests.fuzz.store" \
	    target/engine/examples/fuzz-wire target/engine/examples/fuzz-store | \
	    xargs -P $$(nproc) -I '{}' bash -c '{} --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)'

FIRECRACKER_TESTS ?= $(addprefix tests/,e2e/test_microvm_checkpoints.py real/test_microvm.py real/test_microvm_guest.py \
    real/test_microvm_store.py conformance/test_microvm.py)

.PHONY: test-firecracker
test-firecracker: setup $(STAMPS)/test-tools ## Run all tests of microVMs on a real Firecracker, emulated twice (root); test has three
	$(SUDO) $(BIN)/python -m tests.nested --seconds 7200 -- \
	    python3 -m pytest -p no:cacheprovider -v -o timeout=1800 $(FIRECRACKER_TESTS)

KILLS ?= 100

.PHONY: test-kills
test-kills: setup ## Kill the server KILLS (100) times under load and look what is lost or left (root); test has a slice
	$(SUDO) $(BIN)/python -m tests.kills --kills $(KILLS)

HISTORIES ?= 500

.PHONY: test-histories
test-histories: setup ## Compare whole workspaces over HISTORIES (500) random histories (root); test has three
	$(SUDO) env HISTORIES=$(HISTORIES) $(BIN)/python -m pytest -q tests/e2e/test_histories.py

STORE_KILLS ?= 1000

.PHONY: test-store-kills
test-store-kills: setup ## Kill users of a store STORE_KILLS (1000) times and look what is lost or left; test has a slice
	$(BIN)/python -m tests.kills.store --kills $(STORE_KILLS)

.PHONY: check
check: setup $(STAMPS)/lint-tools ## Run every static check: style, types, import order, Rust lints, generated files
	@$(STEP) "ruff check" "Try: $(BIN)/ruff check --fix" $(BIN)/ruff check .
	@$(STEP) "ruff format" "Run: make format" $(BIN)/ruff format --check src tests scripts crates spec examples
	@$(STEP) "mypy" "See the types above." $(BIN)/mypy src tests scripts crates/engine/python examples/bubblewrap/src
	@$(STEP) "import order" "See [tool.importlinter] in pyproject.toml." $(BIN)/lint-imports
	@$(STEP) "cargo fmt" "Run: make format" cargo fmt --all --check
	@$(STEP) "cargo clippy" "See the lints above." \
	    cargo clippy --locked --workspace --all-targets --all-features --quiet -- -D warnings
	@$(STEP) "generated files" "Run: make docs" $(BIN)/python scripts/generate.py --check

.PHONY: format
format: setup ## Format the Python and Rust sources
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet src tests scripts crates spec examples
	@cargo fmt --all

.PHONY: docs openapi
docs: setup ## Generate spec/openapi.json and the reference pages
	@$(BIN)/python scripts/generate.py
openapi: docs

.PHONY: conformance
conformance: setup $(STAMPS)/test-tools ## Run the conformance kit on every backend here (root) and make docs/backends.md from it
	@$(SUDO) scripts/conformance $(BACKENDS)
	@$(MAKE) docs

.PHONY: bench
bench: setup $(STAMPS)/bench-tools ## Measure the promised figures on this machine (root); with bench-store, some 30 minutes
	@$(SUDO) $(BIN)/python -m tests.bench
	@$(MAKE) bench-store

.PHONY: bench-store
bench-store: setup $(STAMPS)/store-bench-tools ## Measure the versioned store beside tar, git, restic and borg
	@$(BIN)/python -m tests.bench.store

.PHONY: soak
soak: test-kills ## The same, then run 10,000 commands and count what is left (root)
	$(SUDO) env SOAK_EXECS=10000 $(BIN)/python -m pytest -s tests/e2e/test_load.py

.PHONY: clean
clean: ## Remove everything that make made
	@rm -rf build target $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find src tests crates scripts -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^##@/ { printf "%s\n", substr($$0, 5) } \
	    /^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
