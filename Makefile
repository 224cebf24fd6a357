# Every target creates .venv if necessary: on a fresh machine `make demo` or `make check` is enough.
PY := .venv/bin/python

.PHONY: demo test browser page lint check format contracts bench gpu docs clean

demo: .venv/.installed
	.venv/bin/everyformer demo

# Two workers with one torch thread each.
test: .venv/.installed
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -q tests

# Drives the page of `everyformer explore` in Debian's chromium.
browser: .venv/.installed
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m browser tests

# Builds the page of `everyformer explore` from its sources in explore/. It needs node 20 or newer.
page:
	cd explore && npm ci --no-audit --no-fund --loglevel=error && npx vite build --logLevel warn

lint: .venv/.installed
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

check: lint
	$(MAKE) test

format: .venv/.installed
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

contracts: .venv/.installed
	.venv/bin/everyformer contracts

bench: .venv/.installed
	$(PY) -m bench.gpt2_step

# Needs a GPU; takes about five minutes and writes docs/results/gpu.md.
gpu: .venv/.installed
	$(PY) -m bench.gpu

# The site, in site/. Nothing is loaded from the network, and a link that leads nowhere is an error.
docs: .venv/.installed
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet
	@echo 'open site/index.html; the search needs a server: $(PY) -m http.server --directory site'

clean:
	rm -rf .venv build site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .git -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -exec rm -rf {} +

# Each Python is run, not only looked up: the shim of a version manager may exist and still fail to start.
.venv/.installed: pyproject.toml constraints.txt
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	    for p in python3.11 python3 python3.12 python3.13; do \
	        $$p -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	            && exec $$p -m venv --clear .venv; \
	    done; \
	    echo 'error: no Python 3.11, 3.12 or 3.13 with the venv module on PATH;' \
	        'install one (on Debian: python3 and python3-venv) and run make again' >&2; exit 1; }
	@echo 'installing into .venv (a minute or two)'
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,plot,image,translate,parquet,tensorboard,control,serve,explore,export,peers,docs,browser]'
	@touch $@
