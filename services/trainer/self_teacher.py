"""The policy as its own teacher: answers of a step, told as if a good answer to their prompt had been seen before.

    policy reads:   what is 2 + 3?                                   -> it is 6
    teacher reads:  what is 2 + 3? Correct solution: 5 Now solve it. -> it is 6

The answers' tokens stay what they are; only what stands before them changes. Hübotter et al. 2026, arXiv:2601.20802.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import structlog

from penstock.protocols.experience import PICTURE, UNSAMPLED, Prompt, Trajectory
from penstock.protocols.routing import no_routing
from penstock.services.learning.batch import TrainingBatch
from penstock.services.trainer.advantage_config import SelfDistillationAdvantage
from penstock.services.turns.tokenizer import TextError, Tokenizer
from penstock.services.turns.tool_calls import answered

log = structlog.get_logger()


@dataclass(frozen=True)
class SelfTeacher:
    """Shows good answers, as ``config`` says, to whoever reads with ``tokenizer``."""

    config: SelfDistillationAdvantage
    tokenizer: Tokenizer

    def retell(self, step: TrainingBatch, longest: int | None) -> dict[int, Trajectory]:
        """By its place in the step, each trajectory that a good answer can be seen before, with that. One that would be
        longer than ``longest`` tokens, or than the config allows, is left out."""
        found = {}
        for place, solution in self._solutions(step).items():
            prompt, answer = step.prompts[place], step.trajectories[place]
            try:
                told = self._ask(prompt, solution)
            except TextError as error:  # what is shown has a picture's own mark, say
                log.warning("nothing can be shown", prompt=prompt.index, error=str(error))
                continue
            answer = replace(answer, pictures=prompt.pictures)
            begun = int(np.argmax(answer.loss_mask))
            if len(told) + len(answer.tokens) - begun <= min(longest or self.config.longest, self.config.longest):
                found[place] = _after(told, answer, begun)
        return found

    def taught(
        self, step: TrainingBatch, policy: list[np.ndarray], longest: int | None,
        evaluate: Callable[[TrainingBatch], list[np.ndarray]],
    ) -> tuple[list[np.ndarray], dict[str, float]]:  # fmt: skip
        """float32 ``[tokens]`` of each trajectory: the log-probabilities that ``evaluate`` gives for it once a good
        answer has been seen; those of ``policy`` where there is none to be seen. And metrics."""
        told = self.retell(step, longest)
        metrics = {"taught_rows": len(told) / max(1, len(step.trajectories)), "taught_gain": 0.0}
        if not told:
            return policy, metrics
        # Each has a prompt of its own now: none is shared within a group.
        alone = replace(step, trajectories=list(told.values()), groups=np.arange(len(told), dtype=np.int64))
        found, gains = list(policy), []
        for (place, shown), values in zip(told.items(), evaluate(alone), strict=True):
            answer = step.trajectories[place]
            said = values[len(shown.tokens) - len(answer.tokens) + int(np.argmax(answer.loss_mask)) :]
            found[place] = np.concatenate([np.zeros(len(answer.tokens) - len(said), np.float32), said])
            gains.append((found[place] - policy[place])[answer.loss_mask == 1])
        return found, metrics | {"taught_gain": float(np.concatenate(gains).mean())}

    def _solutions(self, step: TrainingBatch) -> dict[int, str]:
        """What can be shown before which trajectory; nothing before one that nothing was sampled of."""
        found = {}
        for number in np.unique(step.groups):
            places = np.flatnonzero(step.groups == number)
            rewards = np.where(np.isfinite(step.rewards[places]), step.rewards[places], -np.inf)
            good = [int(p) for p in places[np.argsort(-rewards, kind="stable")] if self._is_good(step, int(p))]
            for place in places.tolist():
                if not step.trajectories[place].sampled:
                    continue
                if self.config.shows == "truth":
                    truth = step.prompts[place].truth
                    if truth is not None and str(truth):
                        found[place] = str(truth)
                elif others := [p for p in good if p != place]:
                    found[place] = self._text(step.trajectories[others[0]])
        return found

    def _is_good(self, step: TrainingBatch, place: int) -> bool:
        return bool(step.rewards[place] >= self.config.success)

    def _text(self, trajectory: Trajectory) -> str:
        return trajectory.text if self.config.thinking else answered(trajectory.text)

    def _ask(self, prompt: Prompt, solution: str) -> np.ndarray:
        """int32 ``[tokens]``: the teacher's prompt."""
        if prompt.pictures:
            solution = solution.replace(PICTURE, "")  # it shows none
        if prompt.messages is None:
            text = self.config.template.format(prompt=prompt.text, solution=solution)
            return self.tokenizer.encode(prompt.model_copy(update={"text": text}))
        *before, last = prompt.messages
        text = self.config.template.format(prompt=last["content"], solution=solution)
        return self.tokenizer.encode(prompt.model_copy(update={"messages": [*before, {**last, "content": text}]}))


def _after(prompt: np.ndarray, answer: Trajectory, begun: int) -> Trajectory:
    """``answer`` from its token ``begun`` on, behind another ``prompt``."""
    size = len(prompt)

    def behind(values: np.ndarray, fill: int) -> np.ndarray:
        return np.concatenate([np.full(size, fill, values.dtype), values[begun:]])

    counts = answer.candidate_counts
    return replace(
        answer,
        tokens=np.concatenate([prompt, answer.tokens[begun:]]),
        loss_mask=behind(answer.loss_mask, 0),
        logprobs=behind(answer.logprobs, 0),
        versions=behind(answer.versions, UNSAMPLED),
        candidate_counts=behind(counts, 0) if counts.size else counts,
        rewards=behind(answer.rewards, 0) if answer.rewards.size else answer.rewards,
        routing=no_routing(),  # that was behind another prompt
    )
