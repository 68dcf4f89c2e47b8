# Two commands from a clean clone do everything: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check lint proto clean

demo: $(READY)
	$(BIN)/outrider demo

test: $(READY) lint
	$(BIN)/python -m pytest

check: lint
	$(BIN)/python -m pytest -m "not ray and not wheel"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# The generated half of the contract; a test fails where it is not what this makes.
proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto outrider/proto/v1/decoding.proto

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]' --group dev
	touch $(READY)

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
