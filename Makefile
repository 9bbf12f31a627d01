PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test quick check numbers stale docs clean

demo: .venv/ready          ## train a ViT on handwritten digits, evaluate it and show it
	$(BIN)/patchword quickstart

test: .venv/ready          ## every test
	$(BIN)/python -m pytest -n auto --dist loadfile --max-worker-restart 0

quick: .venv/ready         ## the tests without the slow ones
	$(BIN)/python -m pytest -n auto --dist loadfile --max-worker-restart 0 -m "not slow"

check: .venv/ready         ## style and types
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

numbers: .venv/ready       ## write the numbers of results/ into README and docs
	$(BIN)/python docs/fill_numbers.py

stale: .venv/ready         ## results older than the code they measure
	$(BIN)/python benchmarks/stale.py

docs: .venv/ready          ## the documentation site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Two test oracles are installed without dependencies: vit-pytorch declares torchvision, which is tied to another torch build, and of joeynmt
# only the attention is needed.
.venv/ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps vit-pytorch==1.26.11 joeynmt==2.3.0
	touch $@

clean:
	rm -rf .venv build src/*.egg-info
