# make train   set up .venv and train the default recipe, digits, to its target
# make test    the whole CPU suite
# make lint    ruff and pyright
.PHONY: test-ranks-a-m test-ranks-n-z test-units-a-l test-rest train test lint format clean
PYTHON ?= python3
BIN := .venv/bin
# The pin must hold for build isolation too, hence the variable and not only the flag.
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

train: .venv/installed
	$(BIN)/hyperbatch train $(ARGS)

# Tests with several processes wait a lot, so four parts run side by side, unless ARGS names some tests.
test: .venv/tested
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	$(MAKE) --jobs=4 --output-sync=target test-ranks-a-m test-ranks-n-z test-units-a-l test-rest
endif

test-ranks-a-m:
	$(BIN)/python -m pytest tests/dist/test_[a-m]*.py

test-ranks-n-z:
	$(BIN)/python -m pytest tests/dist/test_[n-z]*.py tests/net

test-units-a-l:
	$(BIN)/python -m pytest tests/unit/test_[a-l]*.py

test-rest:
	$(BIN)/python -m pytest --ignore=tests/dist --ignore=tests/net --ignore-glob='tests/unit/test_[a-l]*.py'

lint: .venv/linted
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# make docs: the documentation as one site, build/site/index.html; warnings are errors
.PHONY: docs
docs: .venv/documented
	$(BIN)/mkdocs build

format: .venv/linted
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build *.egg-info

# Stamp files: set-up runs again only when what it installs changes.
$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml setup.py constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/tested: .venv/installed
	$(BIN)/pip install --quiet --editable '.[test,docs]'
	touch $@

.venv/documented: .venv/installed
	$(BIN)/pip install --quiet --editable '.[docs]'
	touch $@

.venv/linted: .venv/installed
	$(BIN)/pip install --quiet --editable '.[test,lint]'
	touch $@
