# Everything a newcomer or a CI server runs. `make help` lists it.
# A bare Debian 12 or Ubuntu 22.04/24.04 is enough: what is missing is installed, as root or with sudo.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:

VENV := .venv
RUN := $(VENV)/bin
SETUP := $(VENV)/.setup-done
SOAK_KILLS ?= 100
SOAK_MINUTES ?= 30
TESTS ?= tests
TESTS_MARKED ?= not slow
# Most tests wait more than they compute. Each worker takes whole files. WORKERS=0 runs one test after the other.
WORKERS ?= 3
# Processes are killed at random moments on machines that others use, too: what fails is run once more, and listed as
# RERUN. It passes only then; what fails twice fails. RERUNS=0 for none.
RERUNS ?= 1

.PHONY: help setup demo test test-all pytest test-verbs frameworks image-check lint format docs bench soak mount-helper clean

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(SETUP) ## make .venv with everything that is needed (again only when what it is made of changed)

$(SETUP): pyproject.toml tests/requirements.txt $(wildcard mount/channel_c/*.[ch]) scripts/system-packages.sh scripts/make-venv.sh
	scripts/system-packages.sh
	scripts/make-venv.sh $(VENV)
	@touch $@

demo: setup ## mount, save and load a real checkpoint, kill the daemon meanwhile, unmount
	$(RUN)/python examples/demo.py

test: lint pytest ## lint and the test suite: what CI runs

test-all: TESTS_MARKED :=
test-all: lint pytest ## and those tests too that take long

pytest: setup ## the tests alone; TESTS=tests/compat runs some of them
	$(RUN)/python -m pytest -n $(WORKERS) --dist loadgroup --reruns $(RERUNS) -m "$(TESTS_MARKED)" $(TESTS)

test-verbs: setup ## the tests of RDMA, in a virtual machine with soft-RoCE (installs qemu and pyverbs if root)
	scripts/test-verbs.sh $(VENV) $(if $(filter-out tests,$(TESTS)),$(TESTS))

frameworks: setup ## install Megatron-Core, torchtitan, Ray and DeepSpeed for tests/compat/test_heavy_frameworks.py, apart from the rest
	DS_BUILD_OPS=0 $(RUN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/frameworks -r tests/frameworks-requirements.txt

# SHARE=/srv/wheels:… are places that the machine's pip is set up with, and that the steps need as well.
image-check: ## replay deploy/container/Dockerfile in a clean root (as root, with debootstrap), and mount with the result
	scripts/replay-dockerfile.py $(addprefix --share ,$(subst :, ,$(SHARE))) deploy/container/Dockerfile -- sh -ec \
	  'mkdir /ckpt && tierfs mount /ckpt -o size=64MiB && echo saved >/ckpt/file && cat /ckpt/file && tierfs umount --discard /ckpt'

lint: setup ## ruff and mypy
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: setup ## let ruff put the code in shape
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

docs: setup ## make anew the pages that are made of the code: settings, metrics, commands, the manual page
	$(RUN)/python -m mount.cli.reference > docs/settings.md
	$(RUN)/python -m mount.metrics_reference > docs/metrics.md
	$(RUN)/python -m mount.cli.commands_reference > docs/commands.md
	$(RUN)/python -m mount.cli.man_page > docs/man/tierfs.1

bench: setup ## measure against baselines taken in the same run; results go to bench/results/
	$(RUN)/python -m pip install -q -r bench/requirements.txt
	PYTHONPATH=tests $(RUN)/python bench/run.py

bench-verbs: setup ## RDMA against ib_read_bw and TCP, in the virtual machine of test-verbs
	scripts/test-verbs.sh $(VENV) --bench

soak: setup ## four nodes save and load for SOAK_MINUTES (30) under random faults of all kinds; SOAK="--seed 7 --faults lose-node,s3-cut"
	PYTHONPATH=tests $(RUN)/python -m soak --minutes $(SOAK_MINUTES) $(SOAK)

soak-kills: setup ## kill daemon and trainers at SOAK_KILLS random moments (100) of saves, half as many of uploads and of nodes
	TIERFS_KILLS=$(SOAK_KILLS) $(RUN)/python -m pytest tests/faults tests/cluster/test_faults.py tests/mount/test_channel.py -m "" --timeout 3600 -v -rP

mount-helper: setup ## let mount(8) and /etc/fstab find tierfs, as root: links in /sbin
	ln -sf $(abspath $(RUN))/mount.tierfs /sbin/mount.tierfs
	ln -sf mount.tierfs /sbin/mount.fuse.tierfs

clean: ## remove .venv and all that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find mount -name '*.so' -delete
