"""The model being trained: one batch in, one optimizer step, metrics out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from services.model import logprobs, shares_prompts
from services.packing import Rows, plan_rows
from services.trainer.algorithms.compose import Algorithm, Part, Totals
from services.trainer.batch import Step
from services.trainer.config import OptimizerConfig, TrainerConfig


class Learner:
    """Model, optimizer and algorithm. ``version`` is the number of steps trained, ``dtype`` what it computes in."""

    def __init__(self, model: Any, config: TrainerConfig, dtype: str, temperature: float) -> None:
        self.model, self._config, self._temperature = model, config, temperature
        self.version = 0
        self.algorithm = Algorithm(config.algorithm)
        self._device = next(model.parameters()).device
        self._bf16 = dtype == "bfloat16"
        optimizer = config.optimizer
        decayed = [p for p in model.parameters() if p.ndim > 1]
        plain = [p for p in model.parameters() if p.ndim <= 1]
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
            model.gradient_checkpointing_enable()

    def train(self, step: Step) -> dict[str, float]:
        """One optimizer step on ``step``; the model then is `version` + 1. Returns the step's metrics."""
        rate = learning_rate(self._config.optimizer, self.version, self._config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss, metrics = self.accumulate(step)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.optimizer.max_grad_norm))
        if math.isfinite(norm) and math.isfinite(loss):
            self.optimizer.step()
        metrics |= {"skipped": float(not (math.isfinite(norm) and math.isfinite(loss)))}
        metrics |= {"loss": loss, "grad_norm": norm, "lr": rate, **self._describe(step)}
        self.version += 1
        return metrics

    def accumulate(self, step: Step) -> tuple[float, dict[str, float]]:
        """Adds the gradient of the whole step to the parameters, a micro-batch at a time. The result does not depend
        on how the step is cut, up to rounding. Returns the loss and metrics."""
        rewarded = np.flatnonzero(step.rewarded)
        trajectories = [step.trajectories[i] for i in rewarded]
        advantages = self._advantages(step, rewarded)
        behaviour = [t.logprobs for t in trajectories]
        reference = None if step.reference is None else [step.reference[i] for i in rewarded]
        sampled = [t.sampled for t in trajectories]
        totals = Totals(float(sum(sampled)), float(sum(count > 0 for count in sampled)))
        if not totals.tokens:
            return 0.0, {}
        budget, shared = self._config.tokens_per_micro_batch, shares_prompts(self.model)
        plan = list(plan_rows(trajectories, step.groups[rewarded], budget, self._device, shared))

        def parts() -> Iterator[Part]:
            for rows in plan:
                with self._autocast():
                    log_prob = logprobs(self.model, rows, self._temperature)
                index = torch.tensor(rows.index, device=self._device)
                yield Part(
                    log_prob,
                    rows.column(behaviour),
                    advantages[index][:, None].expand_as(log_prob),
                    rows.mask,
                    None if reference is None else rows.column(reference),
                )

        mean_weight = self._mean_weight(parts()) if self.algorithm.needs_first_pass else 1.0
        total: float = 0.0
        sums: dict[str, float] = {}
        for rows, part in zip(plan, parts(), strict=True):
            loss, found = self.algorithm.loss(part, totals, mean_weight)
            loss.backward()
            total += float(loss.detach())
            share: float = _share(rows, totals)
            found["mismatch"] = (part.log_prob.detach() - part.behaviour).abs().sum() / part.mask.sum().clamp(min=1)
            found["surprise"] = -part.log_prob.detach().sum() / part.mask.sum().clamp(min=1)
            for name, mean in found.items():
                sums[name] = sums.get(name, 0.0) + share * float(mean)
        return total, sums

    def _advantages(self, step: Step, rewarded: np.ndarray) -> torch.Tensor:
        scores = torch.from_numpy(step.rewards[rewarded].astype(np.float64))
        groups = torch.from_numpy(step.groups[rewarded])
        return self.algorithm.advantages(scores, groups).float().to(self._device)

    @torch.no_grad()
    def _mean_weight(self, parts: Iterator[Part]) -> float:
        total = count = 0.0
        for part in parts:
            weights, _ = self.algorithm.weights(part)
            if weights is not None:
                total, count = total + float(weights.sum()), count + float(part.mask.sum())
        return total / count if count else 1.0

    def _autocast(self) -> Any:
        return torch.autocast(self._device.type, torch.bfloat16) if self._bf16 else nullcontext()

    def _describe(self, step: Step) -> dict[str, float]:
        lags = step.lags(self.version)
        lengths = np.array([t.sampled for t in step.trajectories])
        rewards = step.rewards[step.rewarded]
        finished = [t.finish == "stop" for t in step.trajectories]
        solved = [step.rewards[step.groups == number] for number in np.unique(step.groups)]
        return {
            "reward": float(rewards.mean()) if rewards.size else float("nan"),
            "reward_std": float(rewards.std()) if rewards.size else float("nan"),
            "reward_missing": float((~step.rewarded).sum()),
            "groups_without_variance": float(sum(float(np.nanstd(group)) == 0 for group in solved)),
            "tokens": float(lags.size),
            "tokens_lagging": float((lags >= 1).sum()),
            "lag_mean": float(lags.mean()) if lags.size else 0.0,
            "lag_max": float(lags.max()) if lags.size else 0.0,
            "response_tokens": float(lengths.mean()),
            "finished_share": float(np.mean(finished)),
        }


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of ``step`` (from 0) of ``steps``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    fall = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_share + (1 - config.final_lr_share) * fall)


def _share(rows: Rows, totals: Totals) -> float:
    return float(rows.mask.sum()) / totals.tokens
