"""What things cost, for a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import Field, ValidationError

from penstock.pipeline.config import Config, ConfigError
from penstock.pipeline.resources.loads import load_of
from penstock.pipeline.resources.memory import critics_each, trainer_of
from penstock.pipeline.resources.readers import BATCH
from penstock.pipeline.resources.search import BANDWIDTH_SHARE, critic_rest_s, critic_times, reference_s, sequences
from penstock.pipeline.resources.step_time import FLOPS_SHARE, LINK_SHARE, forward_s, switch_s, train_s
from penstock.pipeline.resources.trainer_memory import version_bytes
from penstock.services.modeling.decoder_shape import Shape
from penstock.services.rollout.config import PluginEngineConfig, VllmEngineConfig
from penstock.services.runtime.gpu_kinds import Device
from penstock.services.runtime.settings import Section

HALVINGS, MOST_UNCUT = 40, 1e6
NETWORK_GB_S = 10.0
"""At which a version is supposed to reach each rollout, where nobody has measured it."""


class Costs(Section):
    """Seconds and tokens. Whatever is drawn has a mean and a spread (its standard deviation over its mean)."""

    length: float = Field(512.0, gt=0)
    """Tokens of a response, on average, of which none is longer than the run allows."""
    length_spread: float = Field(0.8, ge=0)
    """Of the lengths, e.g. ``1.0``: a long tail (log-normal); 0: all are alike."""
    lengths: tuple[int, ...] = ()
    """Lengths that were seen, which are drawn from instead."""
    prompt: float = Field(256.0, ge=0)
    """Tokens of a prompt."""
    decode_s: float = Field(0.01, gt=0)
    """A decoding step, whatever it decodes."""
    decode_sequence_s: float = Field(0.0, ge=0)
    """More, for each sequence that is decoded."""
    decode_compute_s: float = Field(0.0, ge=0)
    """A decoding step takes at least this for each sequence: its arithmetic."""
    most_sequences: int | None = Field(None, ge=1)
    """That an engine has memory for, e.g. ``200``; null: as many as it may decode at once."""
    prefill_token_s: float = Field(0.0, ge=0)
    """Of a rollout, for each token of a prompt."""
    train_token_s: float = Field(1e-4, ge=0)
    """Of the trainer, for each sampled token of a step."""
    score_token_s: float = Field(0.0, ge=0)
    """Of a scorer that computes (reference, one of your own), for each sampled token."""
    critic_values_token_s: float = Field(0.0, ge=0)
    """Of a critic, for each sampled token of a step, until the trainer has its values."""
    critic_train_token_s: float = Field(0.0, ge=0)
    """The same, until it has learned from the step, beside the trainer."""
    reward_s: float = Field(0.0, ge=0)
    """Until a response has its reward; any number at once. A group waits for its slowest."""
    reward_spread: float = Field(0.5, ge=0)
    """Of these."""
    reward_most_s: float = Field(600.0, ge=0)
    """The longest that a reward takes."""
    publish_s: float = Field(0.0, ge=0)
    """From the end of a step until rollouts have its version; the trainer does not wait for it."""
    pause_s: float = Field(0.0, ge=0)
    """That a rollout stands still for a version."""
    switch_s: float = Field(0.0, ge=0)
    """With run.placement=colocated, of each step: until rollouts sleep and the trainer can begin, and until they are
    awake again."""
    start_s: float = Field(60.0, ge=0)
    """From the death of a process until another has taken its place."""
    rollout_lives_s: float | None = Field(None, gt=0)
    """Until a rollout dies, on average, e.g. ``36000``; null: none does."""
    trainer_lives_s: float | None = Field(None, gt=0)
    """The same of the trainer."""
    cores: float | None = Field(None, gt=0)
    """That all actors share, on a machine without a GPU, e.g. ``2``; null: each has its own."""

    def draw_lengths(self, random: np.random.Generator, count: int, longest: int) -> np.ndarray:
        """int64 ``[count]``, with the mean that was asked for, though none is above ``longest``; those that were seen
        are what they were, but for that."""
        if self.lengths:
            return np.clip(random.choice(np.array(self.lengths), count), 1, longest).astype(np.int64)
        found = draw(random, uncut(self.length, self.length_spread, longest), self.length_spread, count)
        return np.clip(np.rint(found), 1, longest).astype(np.int64)

    def draw_reward_s(self, random: np.random.Generator, count: int) -> float:
        """Seconds until a group of so many responses has all its rewards."""
        return min(float(draw(random, self.reward_s, self.reward_spread, count).max()), self.reward_most_s)


def draw(random: np.random.Generator, mean: float, spread: float, count: int) -> np.ndarray:
    """float64 ``[count]``, log-normal with this mean."""
    sigma = np.sqrt(np.log1p(spread**2))
    return mean * random.lognormal(-(sigma**2) / 2, sigma, count)


@lru_cache(maxsize=64)
def uncut(mean: float, spread: float, longest: float) -> float:
    """The mean that lengths must have so that theirs is ``mean`` once none is above ``longest``; found by halving."""
    sigma = math.sqrt(math.log1p(spread**2))
    if not sigma or mean >= longest:  # all are as long as they may be
        return mean if not sigma else MOST_UNCUT * longest

    def cut(other: float) -> float:
        place = (math.log(longest / other) + sigma**2 / 2) / sigma
        return other * _normal(place - sigma) + longest * (1 - _normal(place))

    low, high = mean, mean
    while cut(high) < mean and high < MOST_UNCUT * longest:
        high *= 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if cut(middle) < mean else (low, middle)
    return high


def _normal(place: float) -> float:
    """Share of a standard normal variable below it."""
    return (1 + math.erf(place / math.sqrt(2))) / 2


def of_file(path: Path) -> Costs:
    """As a file says that `save` has written, or somebody by hand."""
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--costs {path}: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"--costs {path}: not keys and values; see docs/simulate.md")
    return checked("--costs", data)


def checked(option: str, data: dict[str, Any]) -> Costs:
    """Raises `ConfigError`, which names the ``option`` and the key."""
    try:
        return Costs.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{option} {key}: {first['msg']}; docs/simulate.md has all keys") from None


def save(costs: Costs, path: Path) -> None:
    """As YAML. Raises `ConfigError`."""
    try:
        path.write_text(yaml.safe_dump(costs.model_dump(mode="json"), sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--save {path}: {error}") from None


def on_gpus(config: Config, shape: Shape, device: Device, length: float, prompt: float) -> Costs:
    """On paper: rooflines, as `penstock plan` counts them. Raises `ConfigError` where an engine has no room."""
    engine = config.rollout.engine
    vllm = engine if isinstance(engine, VllmEngineConfig) else VllmEngineConfig()
    tensor, stages = (int(vllm.vllm.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline"))
    data, share = vllm.replicas, vllm.share
    weights, bandwidth = shape.parameters * shape.served_bytes, device.gb_s * 1e9 * BANDWIDTH_SHARE
    # Of a step's sequences each data-parallel engine has a part, and each stage of it has a part of those at a time.
    parts = data * stages
    kv = (prompt + length / 2) * shape.kv_bytes / shape.kv_ranks(tensor)
    flops = device.tflops * 1e12 * FLOPS_SHARE
    step = load_of(config, length, prompt)
    trained = train_s(shape, trainer_of(config), step, device) / step.tokens
    whole = prompt + length
    values_s, critic_s = critic_times(config, step, device)
    switched = switch_s(shape, config.trainer, tensor * stages, device)
    switched += critic_rest_s(config, device) * critics_each(config)
    most = data * int(sequences(config, shape, tensor, device, whole, share))
    if not most and not isinstance(engine, PluginEngineConfig) and not getattr(engine, "unsized", None):
        raise ConfigError(
            f"--gpus: an engine's {tensor * stages} x {device.name} of {device.gib:g} GiB have no room for a sequence "
            f"beside {shape.name}; take larger ones, a shorter rollout.engine.max_length, or more for each engine "
            "(rollout.engine.vllm.tensor_parallel_size)"
        )
    found = {
        "length": length,
        "prompt": prompt,
        "most_sequences": max(1, most),
        "decode_compute_s": 2 * shape.met / (tensor * parts * flops),
        "decode_s": weights / tensor / bandwidth,  # stage after stage, so all of them
        "decode_sequence_s": kv / parts / bandwidth,
        "prefill_token_s": 2 * shape.met / (tensor * parts * flops),
        "train_token_s": trained,
        "score_token_s": (reference_s(config, step, device) or forward_s(shape, 1, step, device, BATCH)) / step.tokens,
        "critic_values_token_s": values_s / step.tokens,
        "critic_train_token_s": critic_s / step.tokens,
        "publish_s": version_bytes(shape, config.trainer) / (NETWORK_GB_S * 1e9),
        # An engine's host has the version by then, and its GPUs read it from there.
        "pause_s": weights / (tensor * stages) / (device.host_gb_s * 1e9 * LINK_SHARE),
        "switch_s": switched if config.run.colocated else 0.0,
    }
    return checked("--gpus", found)


def mean(values: Sequence[float]) -> float:
    """0 of none."""
    return float(np.mean(values)) if len(values) else 0.0
