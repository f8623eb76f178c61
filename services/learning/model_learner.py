"""A model that learns: its optimizer, its place among the ranks, and its version."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import structlog
import torch

from penstock.protocols.experience import Trajectory
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.config import GRADIENT_SHARE, LearnerConfig
from penstock.services.learning.layer_norms import LayerNorms
from penstock.services.learning.loss_scale import TRIES, LossScale
from penstock.services.learning.model_flops import ModelFlops
from penstock.services.learning.optimizer import make_optimizer, set_rate, stepping
from penstock.services.learning.optimizer_config import OptimizerConfig
from penstock.services.learning.out_of_memory import MicroBatches
from penstock.services.learning.phase_memory import PhaseMemory
from penstock.services.modeling.buffers import persistent_buffers
from penstock.services.modeling.by_trajectory import by_trajectory
from penstock.services.modeling.checkpointing import keep_products
from penstock.services.modeling.dropout import without_dropout
from penstock.services.modeling.four_bit import FourBitLinear
from penstock.services.modeling.logprobs import layout_of
from penstock.services.modeling.lora import Adapted
from penstock.services.modeling.packing import Pass, Rows, plan_passes
from penstock.services.modeling.parallel.fsdp import (
    clip_gradients,
    forget_backward,
    keep_gathered,
    reshard,
    sum_gradients,
)
from penstock.services.modeling.parallel.gathered import Gathered
from penstock.services.modeling.parallel.stages import Stage, ahead
from penstock.services.modeling.parallel.tensor import Turned, is_turned, sum_partial
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.resting import Resting
from penstock.services.modeling.routing import mixture_of
from penstock.services.modeling.sight import resting_sight
from penstock.services.modeling.tiled_mlp import tile_mlps
from penstock.services.runtime import allowance

log = structlog.get_logger()

T = TypeVar("T")
ENOUGH = 3
"""Micro-batches for each stage of a pipeline, from which on it is not worth a word how long they stand idle."""


class ModelLearner:
    """Model and optimizer. ``version`` is the number of steps trained, ``steps`` how many the run has; in the first
    ``frozen_steps`` of them the weights stay as they are, and the learning rate's schedule begins behind them.

    Where ``world`` has several ranks, each of them calls every method with the same arguments.
    """

    SECTION = "trainer"
    """Its keys, in the config."""
    PUBLISHES = True
    """Others are sent its versions."""
    average: Any = None
    """Of its weights a running mean, where it keeps one in the optimizer's state."""
    VALUED = False
    """Its model has a head of values, though not on each rank of a pipeline."""

    def __init__(
        self, model: Any, config: LearnerConfig, steps: int, world: World | None = None, frozen_steps: int = 0
    ) -> None:
        self.model, self._learning, self._steps, self._frozen_steps = model, config, steps, frozen_steps
        # Asked for once: between a forward and a backward, a cut model shows gathered copies in their place.
        every: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        self.parameters = {name: parameter for name, parameter in every.items() if parameter.requires_grad}
        """What is trained."""
        self.adapted = Adapted(model, every) if hasattr(model, "peft_config") else None
        """Where that is an adapter alone."""
        self.stage: Stage | None = getattr(model, "penstock_stage", None)
        if self.stage:
            self.stage.mark(every)
        self.version = 0
        self.state: dict[str, float] = {}
        """What else a checkpoint has: numbers that steps have changed."""
        self.world = world or World(next(model.parameters()).device)
        self.device = self.world.device
        """That computes; where they are offloaded, parameters lie on the host."""
        self.loss_scale = LossScale(self.state, getattr(model, "penstock_half", None) is torch.float16)
        self.memory = PhaseMemory(self.device)
        self.flops = ModelFlops()
        self._resting = Resting(self.device)
        coded = [module for module in model.modules() if isinstance(module, FourBitLinear)]
        self._frozen = [parameter for parameter in every.values() if not parameter.requires_grad]
        self._frozen += [buffer for module in coded for buffer in module.buffers()]
        """Which nothing changes."""
        self.published: dict[str, torch.Tensor | Gathered] = self._published(every) if self.PUBLISHES else {}
        """What a version consists of."""
        on_host, key = config.means_on_host, f"{self.SECTION}.optimizer"
        self.optimizer = make_optimizer(model, self.parameters, config.optimizer, self.world, on_host, key)
        model.train()
        self.config = copy.deepcopy(model.config)
        """The model's, with its own dropout: as a checkpoint has it."""
        without_dropout(model)
        if config.gradient_checkpointing:
            how = {"context_fn": keep_products} if config.gradient_checkpointing == "selective" else {}
            model.gradient_checkpointing_enable({"use_reentrant": False, **how})  # a frozen model's inputs need none
        if config.tokens_per_mlp:
            tile_mlps(model, config.tokens_per_mlp, f"{self.SECTION}.tokens_per_mlp")
        if config.reshard_after != "layer":
            keep_gathered(model)
        may_shrink = config.halve_micro_batches and self.world.size == 1
        self.micro_batches = MicroBatches(config.tokens_per_micro_batch, may_shrink, self.SECTION, self.device)
        self._said = False
        """That stages stand idle."""
        self.sums_once = self._sums_once(config.sum_gradients)
        """Gradients are summed over the ranks once a step, not after each micro-batch."""

    def passes(self, trajectories: Sequence[Trajectory], groups: np.ndarray, budget: int) -> Iterator[Pass]:
        """Forward passes of at most ``budget`` tokens, the same on every rank."""
        layout = "packed" if self.world.shape.sequence > 1 else layout_of(self.model, trajectories)
        routed = mixture_of(self.model) is not None
        return plan_passes(trajectories, groups, budget, self.device, layout, routed, self.world.data_size)

    def plan(self, trajectories: Sequence[Trajectory], groups: np.ndarray) -> list[tuple[Pass, float]]:
        """This rank's micro-batches, each with how often it counts: where its share is one short, another's counts 0
        times, since all must take part; of a pipeline's stages those of the last one count."""
        mine = self._dealt(self.passes(trajectories, groups, self.micro_batches.tokens))
        rounds, stages = len(mine), self.world.shape.stages
        if stages > 1 and rounds < ENOUGH * stages and not self._said and not self.world.rank:
            self._said = True
            log.warning(
                f"{self.SECTION}.tokens_per_micro_batch: a pipeline's stages wait for each other where an update has "
                "few micro-batches; take fewer tokens",
                stages=stages, micro_batches=rounds, idle=f"{(stages - 1) / (rounds + stages - 1):.0%}",
            )  # fmt: skip
        return [(each, float(counts and self.world.last_stage)) for each, counts in mine]

    def _dealt(self, passes: Iterable[Pass]) -> list[tuple[Pass, bool]]:
        """This rank's of ``passes``, as many as any other's, each with whether it counts here: where its share is one
        short, it computes another's, a small one. Ranks wait for each other in every pass, as they gather parameters:
        those of about one size are computed at once."""
        every, size = list(passes), self.world.data_size
        self.flops.deal(every)
        if size > 1:
            every.sort(key=lambda each: (each.real, each.pairs), reverse=True)
        mine = range(self.world.data_rank, -(-len(every) // size) * size, size)
        return [(every[min(i, len(every) - 1)], i < len(every)) for i in mine]

    def early(self, parts: Iterable[T]) -> Iterator[T]:
        """``parts``, each a forward pass: of a pipeline's stage, as many ahead as there are stages behind it."""
        return ahead(parts, self.world.shape.stages - 1 - self.world.stage)

    def evaluate(self, step: TrainingBatch, compute: Callable[[Rows], torch.Tensor]) -> list[np.ndarray]:
        """What ``compute`` gives for the sampled tokens of the whole step, as `evaluated`."""
        return self.evaluated(step.trajectories, step.groups, compute)

    @torch.no_grad()
    def evaluated(
        self, trajectories: Sequence[Trajectory], groups: np.ndarray, compute: Callable[[Rows], torch.Tensor]
    ) -> list[np.ndarray]:
        """What ``compute`` gives for the sampled tokens of ``trajectories``, which are of these ``groups``: float32
        ``[tokens]`` of each, 0 where nothing was sampled. The ranks share the work, and each is told all of it: it may
        need any row later."""

        def of_mine() -> tuple[list[np.ndarray], list[int]]:
            mine = self._dealt(self.passes(trajectories, groups, self.micro_batches.tokens))
            found = by_trajectory(trajectories, (each.rows() for each, _ in mine), compute)
            return found, [index for each, counts in mine if counts for index in each.index]

        with self.memory.of("memory/first_pass"):
            found, mine = self.micro_batches.fitting("first pass over a step", of_mine, lambda: reshard(self.model))
        self.flops.forward()
        reshard(self.model)
        if self.stage:
            self.stage.settle()
        return self._of_all(trajectories, found, mine)

    def _of_all(self, trajectories: Sequence[Trajectory], found: list[np.ndarray], mine: list[int]) -> list[np.ndarray]:
        """What any rank has ``found``, of which this one knows that of the trajectories ``mine``."""
        if self.world.size == 1 or not found:
            return found
        shape = next(values.shape[:-1] for values in found if values.size)
        ends = np.cumsum([len(trajectory.tokens) for trajectory in trajectories])
        every = np.zeros((*shape, ends[-1]), np.float32)
        if self.world.tells:
            for index in mine:
                every[..., ends[index] - found[index].shape[-1] : ends[index]] = found[index]
        return np.split(self.world.add(torch.from_numpy(every)).numpy(), ends[:-1], axis=-1)

    def sum_gradients(self, last: bool) -> None:
        """Before the backward of a micro-batch, the ``last`` of its update or not: whether ranks sum gradients in it,
        and what they keep behind it."""
        sum_gradients(self.model, not self.sums_once, last, self._learning.reshard_after == "update")

    def give_up_update(self) -> None:
        """Forgets the gradient, also of a backward that was broken off."""
        forget_backward(self.model)
        self.optimizer.zero_grad(set_to_none=True)

    def keeping(self) -> AbstractContextManager[Any]:
        """Around a forward that a backward follows: where activations are kept."""
        if not self._learning.offload_activations:
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")

    def penalties_of_step(self, frozen_steps: int) -> dict[str, float]:
        """The `state` that a step's rewards are made by; in the ``frozen_steps`` in which the policy stands still, and
        cannot answer to a penalty that grows, a copy that nobody keeps. The same for all learners of a run."""
        return self.state if self.version >= frozen_steps else dict(self.state)

    def begin_update(self) -> float:
        """Forgets the last gradient. Returns the learning rate, which is the same for all updates of a step."""
        learned = max(0, self.version - self._frozen_steps)
        rate = learning_rate(self._learning.optimizer, learned, self._steps - self._frozen_steps)
        set_rate(self.optimizer, rate)
        self.optimizer.zero_grad(set_to_none=True)
        return rate

    def gradient(self, accumulate: Callable[[], tuple[float, T]]) -> tuple[float, T]:
        """What ``accumulate`` gives, which adds the gradient of an update and says its loss first. It is asked again
        where that does not fit: the GPU, or fp16."""
        scale, begun, counted = self.loss_scale, self.loss_scale.value, self.flops.total
        for tries in range(1, TRIES + 1):
            found = self.micro_batches.fitting("forward or backward pass", accumulate, self.give_up_update)
            if not scale.used:
                break
            if not math.isfinite(found[0]):
                scale.take_off(self.parameters.values())
                break
            if scale.undo(self.parameters.values(), self.world):
                break
            if tries == TRIES:
                scale.fall(begun)  # it was not the scale
                break
            log.warning(f"{self.SECTION}: a gradient beyond fp16, computed again", loss_scale=scale.value)
            self.flops.total = counted
            if self.stage:
                self.stage.settle()
            self.give_up_update()
        return found

    def end_update(
        self,
        loss: float,
        before_update: Callable[[], None] = lambda: None,
        norms: LayerNorms | None = None,
    ) -> dict[str, float]:
        """Clips the gradient and changes the weights by it, unless it or ``loss`` is not finite, or the weights are
        frozen in this step. ``before_update`` is called before a parameter changes; ``norms`` watch."""
        bound = self._learning.optimizer.max_grad_norm
        sum_partial(self.model, self.parameters, self.world)
        if self.stage:
            self.stage.settle()
            self.stage.sum_tied(self.parameters)
        if norms:
            norms.before()
        norm = float(clip_gradients(self.parameters, self.world, bound))
        before_update()
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite and self.version >= self._frozen_steps:
            with stepping(self.optimizer):
                self.optimizer.step()
            self.gather()
        watched = norms.after() if norms else {}
        scaled = {"loss_scale": self.loss_scale.value} if self.loss_scale.used else {}
        return {"grad_norm": norm, "skipped": float(not finite)} | scaled | watched

    def rest(self) -> None:
        """Gives its device's memory back: what it holds lies on the host until `wake`, which is to be called before
        anything else."""
        self.optimizer.zero_grad(set_to_none=True)
        self._resting.rest(self._held(), self._frozen)

    def wake(self) -> None:
        """Takes its place on its device again."""
        self._resting.wake()

    def _held(self) -> Iterator[torch.Tensor]:
        """All that it holds between two steps."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from resting_sight(self.model)
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        yield from (weight.local() for weight in self.published.values() if isinstance(weight, Turned))

    def gather(self) -> None:
        """What is published and made of several ranks' parts is made again: by all of them, when weights have
        changed."""
        for weight in self.published.values():
            if not isinstance(weight, torch.Tensor):
                weight.gather()

    def _published(self, every: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor | Gathered]:
        if self.adapted and self._learning.sends_adapter:
            return {**self.adapted.alone}
        place = next(iter(every.values())).device  # parameters that are offloaded lie elsewhere than buffers
        buffers = {name: torch.nn.Buffer(b.to(place)) for name, b in persistent_buffers(self.model).items()}
        if self.adapted:
            return {**self.adapted.published, **buffers}
        return {**{name: Turned(p, self.world) if is_turned(p) else p for name, p in every.items()}, **buffers}

    def _sums_once(self, when: str) -> bool:
        """With ``auto``, where every rank has room for the whole model's gradients, in fp32."""
        if self.world.size == 1 and not self._learning.weights_on_host:
            return False
        if when != "auto":
            return when == "step"
        needed = 4 * sum(parameter.numel() for parameter in self.parameters.values())
        here = self.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.device)[0] if here else allowance.memory()[1] // self.world.size
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
    """The mean over the updates that have it, of each metric; of a maximum the maximum, and of a share by lag the mean
    over all that have any."""
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    found = {name: [metrics[name] for metrics in updates if name in metrics] for name in names}
    shares = sum(any(is_lag_share(name) for name in metrics) for metrics in updates)
    return {
        name: max(values) if name.endswith("_max") else sum(values) / (shares if is_lag_share(name) else len(values))
        for name, values in found.items()
    }


def is_lag_share(name: str) -> bool:
    """The metric is the share of tokens of one lag: one that an update has none of is not there."""
    return name.startswith("lag/") and name.endswith("/share")


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of ``step`` (from 0) of ``steps``."""
    warmup = config.warmup_steps or round(config.warmup_share * steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    begin = warmup if config.decay_share is None else max(warmup, steps - round(config.decay_share * steps) - 1)
    progress = min(1.0, max(0, step - begin) / max(1, steps - begin - 1))
    fall = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_share + (1 - config.final_lr_share) * fall)
