# make demo   set up, open the demo with the package's own model (MODELS="runs/a runs/b": with these)
# make run    set up, train the small captioner on the built-in scenes, open the demo (DEMO=0: not)
# make test   set up, run the tests
# make train DATA=folder OUT=runs/mine    train on your own pictures (ARGS="--epochs 20 ...")
# make lint   ruff
# make docs   the reference of all modules, in build/docs/vlattn.html
PYTHON ?= python3
OUT ?= runs/mine
DEMO ?= 1
PORT ?= 7860
BIN := .venv/bin
# Every module that holds something; pdoc finds vlattn.metrics by itself.
MODULES = $(shell find vlattn -name '*.py' -size +0 -not -path '*kernels*' -not -name metrics.py \
	| sed 's,/__init__,,; s,.py$$,,; y,/,.,')
# Waiting threads spin briefly, then sleep: faster where other programs use the cores too.
export GOMP_SPINCOUNT ?= 20000

.PHONY: run test train demo lint docs setup

run: setup
	$(BIN)/python examples/train_scenes.py --out runs/scenes --resume auto
ifneq ($(DEMO),0)
	$(BIN)/vlattn demo --model runs/scenes --port $(PORT)
endif

test: setup
	$(BIN)/python -m pytest

train: setup
	$(BIN)/python examples/train_captioner.py --data "$(DATA)" --out "$(OUT)" --resume auto $(ARGS)

demo: setup
	$(BIN)/vlattn demo $(MODELS:%=--model %) --port $(PORT)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: setup
	$(BIN)/pdoc --docformat google -o build/docs $(MODULES)

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch .venv/ready
