"""A model that learns: its optimizer, its place among the ranks, and its version."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import torch

from penstock.protocols.experience import Trajectory
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.config import GRADIENT_SHARE, LearnerConfig, OptimizerConfig
from penstock.services.modeling.logprobs import shares_prompts
from penstock.services.modeling.lora import Adapted, Merged
from penstock.services.modeling.packing import Rows, by_trajectory, plan_rows
from penstock.services.modeling.parallel.fsdp import full, reshard
from penstock.services.modeling.parallel.world import World


class ModelLearner:
    """Model and optimizer. ``version`` is the number of steps trained, ``steps`` how many the run has.

    Where ``world`` has several ranks, each of them calls every method with the same arguments.
    """

    def __init__(self, model: Any, config: LearnerConfig, steps: int, world: World | None = None) -> None:
        self.model, self._learning, self._steps = model, config, steps
        # Asked for once: between a forward and a backward, a cut model shows gathered copies in their place.
        every: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        self.parameters = {name: parameter for name, parameter in every.items() if parameter.requires_grad}
        """What is trained."""
        self.adapted = Adapted(model, every) if hasattr(model, "peft_config") else None
        """Where that is an adapter alone."""
        self.published: dict[str, torch.Tensor | Merged] = self.adapted.published if self.adapted else {**every}
        """What a version consists of."""
        self.version = 0
        self.state: dict[str, float] = {}
        """What else a checkpoint has: numbers that steps have changed."""
        self.device = next(model.parameters()).device
        self.world = world or World(self.device)
        optimizer = config.optimizer
        decayed = [p for p in self.parameters.values() if p.ndim > 1]
        plain = [p for p in self.parameters.values() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": optimizer.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True
        )
        model.train()
        for module in model.modules():  # what the rollout sampled without dropout is not judged with it
            for name in ("p", "attention_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(
                {"use_reentrant": False}
            )  # the inputs of a frozen model need no gradient
        self.sums_once = self._sums_once(config.sum_gradients)
        """Gradients are summed over the ranks once a step, not after each micro-batch."""

    def plan(self, trajectories: Sequence[Trajectory], groups: np.ndarray) -> list[tuple[Rows, float]]:
        """This rank's micro-batches, each with how often it counts: where its share is one short, another's counts 0
        times, since all must take part."""
        budget, shared = self._learning.tokens_per_micro_batch, shares_prompts(self.model)
        everyone = list(plan_rows(trajectories, groups, budget, self.device, shared))
        rounds = -(-len(everyone) // self.world.size)
        mine = [self.world.rank + turn * self.world.size for turn in range(rounds)]
        return [(everyone[i % len(everyone)], float(i < len(everyone))) for i in mine]

    @torch.no_grad()
    def evaluate(self, step: TrainingBatch, compute: Callable[[Rows], torch.Tensor]) -> list[np.ndarray]:
        """What ``compute`` gives for the sampled tokens of the whole step: float32 ``[tokens]`` of each trajectory, 0
        where nothing was sampled. Every rank computes all of it: each may need any row later."""
        budget, shared = self._learning.tokens_per_micro_batch, shares_prompts(self.model)
        passes = plan_rows(step.trajectories, step.groups, budget, self.device, shared)
        found = by_trajectory(step.trajectories, passes, compute)
        reshard(self.model)
        return found

    def begin_update(self) -> float:
        """Forgets the last gradient. Returns the learning rate, which is the same for all updates of a step."""
        rate = learning_rate(self._learning.optimizer, self.version, self._steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        return rate

    def end_update(
        self, loss: float, before_update: Callable[[], None] = lambda: None, frozen: bool = False
    ) -> dict[str, float]:
        """Clips the gradient and changes the weights by it, unless it or ``loss`` is not finite, or the weights are
        ``frozen`` in this step. ``before_update`` is called before a parameter changes."""
        bound = self._learning.optimizer.max_grad_norm
        norm = float(full(torch.nn.utils.clip_grad_norm_(self.parameters.values(), bound)))
        before_update()
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite and not frozen:
            self.optimizer.step()
            if self.adapted:
                self.adapted.gather()
        return {"grad_norm": norm, "skipped": float(not finite)}

    def _sums_once(self, when: str) -> bool:
        """With ``auto``, where every rank has room for the whole model's gradients, in fp32."""
        if self.world.size == 1:
            return False
        if when != "auto":
            return when == "step"
        needed = 4 * sum(parameter.numel() for parameter in self.parameters.values())
        here = self.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.device)[0] if here else psutil.virtual_memory().available // self.world.size
        return not self.world.max(float(needed > GRADIENT_SHARE * free))


def mini_batches(step: TrainingBatch, epochs: int, parts: int) -> Iterator[np.ndarray]:
    """Numbers of the step's trajectories, for each update: in each of ``epochs`` its groups are dealt into as many
    ``parts``, whole, in an order that follows from the step and the epoch alone, so that a redo is the same."""
    numbers = np.unique(step.groups)
    for epoch in range(epochs):
        if parts == 1:
            yield np.arange(len(step.groups))
            continue
        order = np.random.default_rng([int(numbers[0]) if numbers.size else 0, epoch]).permutation(numbers)
        for part in np.array_split(order, parts):
            yield np.flatnonzero(np.isin(step.groups, part))


def mean_metrics(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean over the updates that have it, of each metric."""
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    found = {name: [metrics[name] for metrics in updates if name in metrics] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of ``step`` (from 0) of ``steps``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    fall = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_share + (1 - config.final_lr_share) * fall)
