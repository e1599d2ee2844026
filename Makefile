# The whole developer interface. `make train` and `make test` need nothing but Python >= 3.11.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes, which share compiled modules

.PHONY: help setup train test test-oldest test-frameworks test-gpu-compile lint format docs docs-serve dist fuzz examples hosts headline soak prometheus image pods kubernetes clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

setup: $(STAMP)  ## make the virtual environment and install zmqtrain into it

train: $(STAMP)  ## train on real digits: honcho starts 1 ps, 1 chief, 2 workers
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/honcho start -c ps=1,chief=1,worker=2

# The examples and the adapter are tested with this version; training needs it only with a torch model.
$(VENV)/.torch: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check 'torch==2.13.0'
	@touch $@

test: lint $(VENV)/.torch  ## check style and types, then run the tests
	$(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

# Each line of pyproject.toml with a package of its own, at its lower bound; tools that only check the code are left out. Old
# libraries leave a socket open, which the old pytest holds against whatever test runs when it is collected.
test-oldest:  ## test with the oldest versions that pyproject.toml allows (Python 3.11)
	$(PYTHON) -m venv --clear build/oldest
	sed -nE 's/^ *"([a-z0-9-]+)>=([^"]+)",$$/\1==\2/p' pyproject.toml | grep -Ev '^(mypy|ruff)=' > build/oldest/versions.txt
	build/oldest/bin/pip install --quiet --disable-pip-version-check --only-binary :all: -r build/oldest/versions.txt
	build/oldest/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	build/oldest/bin/pytest --numprocesses auto --maxprocesses 8 --dist worksteal \
	  -W ignore::pytest.PytestUnraisableExceptionWarning

# The adapters of the other frameworks, and readers of data, are tested with these versions.
$(VENV)/.frameworks: $(VENV)/.torch
	$(BIN)/pip install --quiet --disable-pip-version-check \
	  'jax==0.10.2' 'optax==0.2.8' 'flax==0.12.8' 'equinox==0.13.8' \
	  'datasets==5.2.0' 'google-crc32c==1.9.0' 'pandas==3.1.1' 'pillow==13.0.0' \
	  'protobuf==7.36.2' 'pyarrow==26.0.1' 'tensorboardX==2.6.5' \
	  'keras==3.15.1' 'h5py==3.16.0'
	@touch $@

test-frameworks: $(VENV)/.frameworks  ## test the adapters of all frameworks (PyTorch, JAX, Keras) and all readers of data
	$(BIN)/pytest --numprocesses auto --maxprocesses 8 tests/adapters tests/data tests/docs
	KERAS_BACKEND=jax $(BIN)/pytest --numprocesses auto --maxprocesses 8 tests/adapters -k keras

# The compilers of CUDA 12 and 13, 150 MB; they need no GPU and no driver.
$(VENV)/.nvrtc: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check \
	  'nvidia-cuda-nvrtc-cu12==12.9.86' 'nvidia-cuda-nvrtc==13.5.37'
	@touch $@

test-gpu-compile: $(VENV)/.nvrtc  ## compile every kernel for every GPU from Turing on, without one (Linux)
	$(BIN)/pytest --numprocesses auto --maxprocesses 8 -m '' tests/optim/test_gpu_compile.py

# The generator of the site, and what reads the docstrings. Versions from 0.0.74 on need a package that is not on every mirror.
$(VENV)/.docs: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check 'zensical==0.0.73' 'mkdocstrings-python==2.0.11'
	@touch $@

docs: $(VENV)/.docs  ## build the site of the documentation into site/
	$(BIN)/python docs/reference/generate.py
	$(BIN)/python docs/stage.py build/docs
	$(BIN)/zensical build --strict --clean

docs-serve: docs  ## show the site at http://127.0.0.1:8000
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000

lint: $(STAMP)  ## check style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

examples: $(STAMP)  ## rewrite the examples of deploy/kubernetes and deploy/slurm
	$(BIN)/python -m tests.clusters.examples

hosts: $(STAMP)  ## test a job on several hosts with broken links, and over ssh, on Slurm and on Ray where installed (Linux, root)
	$(BIN)/pytest -m '' tests/hosts

prometheus: $(STAMP)  ## test the files of deploy/prometheus with Prometheus and Alertmanager on PATH
	$(BIN)/pytest -m prometheus tests/deploy

image:  ## build deploy/Containerfile with podman; DEBIAN=bookworm if no registry can be reached
	deploy/image.sh

pods: $(STAMP)  ## drill the pods of a submitted job under podman: kill, remove, end (root; make image)
	$(BIN)/python deploy/drills.py pods

kubernetes: $(STAMP)  ## drill a submitted job on the cluster of the kubectl context CONTEXT=...; IMAGE=...
	$(BIN)/python deploy/drills.py kubernetes "$(CONTEXT)"

$(VENV)/.fuzz: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev,fuzz]'
	@mkdir -p $(VENV)/fuzz
	@touch $@

SECONDS ?= 60
fuzz: $(VENV)/.fuzz  ## feed the decoder with hostile bytes for SECONDS=60 (Linux)
	$(BIN)/python -m tests.fuzz.fuzz_codec -max_total_time=$(SECONDS) -max_len=8192 -verbosity=0 \
	  -print_final_stats=1 -artifact_prefix=$(VENV)/fuzz/ $(VENV)/fuzz

$(VENV)/.bench: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev,bench]'
	@touch $@

headline: $(VENV)/.bench  ## kill everything for two minutes while it trains; check every promise
	$(BIN)/python -m bench headline --plot headline.png
	$(BIN)/python -m bench headline --without-ps

$(VENV)/.build: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check 'build==1.6.1'
	@touch $@

# The wheel is made from the sdist and tried in an environment that has nothing else.
dist: $(VENV)/.build  ## build wheel and sdist into dist/, and train with the wheel in a clean environment
	rm -rf dist build/clean
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv build/clean
	build/clean/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	cd build/clean && bin/zmqtrain doctor && bin/zmqtrain init net.py --framework numpy && \
	  bin/zmqtrain run net.py --workers 2 --json

MINUTES ?= 10
soak: $(STAMP)  ## simulated and real jobs under faults for MINUTES=10; SEED=N repeats them
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

clean:  ## remove what the commands above made
	rm -rf $(VENV) site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
