"""The reference scorer: log-probabilities of sampled tokens under a frozen model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from penstock.protocols.columns import REFERENCE
from penstock.protocols.experience import ExperienceError, Group
from penstock.services.data.picture_files import PictureError
from penstock.services.modeling import determinism
from penstock.services.modeling.frozen_model import FrozenModel
from penstock.services.modeling.load import check_vocabulary, devices_of
from penstock.services.modeling.logprobs import logprobs
from penstock.services.modeling.lora import Adapter
from penstock.services.reference.config import ReferenceConfig
from penstock.services.reference.mixing import mix_up_to
from penstock.services.runtime import checkpoint_folders, device_turn, health
from penstock.services.runtime.actor import ActorContext
from penstock.services.runtime.checkpoint_folders import MIXTURES
from penstock.services.runtime.device_turn import Guest
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.scorer import Answer, ScorerActor, ScoringTask

log = structlog.get_logger()


class Reference:
    """The frozen model. With ``alone`` it scores each group by itself: a group's numbers may depend on what else is in
    its batch, in the last bit. ``checkpoints``: where versions of the policy are that may take its place.
    ``quantized``: see `FrozenModel`."""

    def __init__(
        self, config: ReferenceConfig, model_path: str, dtype: str, temperature: float, alone: bool, checkpoints: Path,
        head_dtype: str | None = None, quantized: Adapter | None = None,
    ) -> None:  # fmt: skip
        self._config, self._temperature, self._alone = config, temperature, alone
        self._checkpoints, self._version = checkpoints, 0
        self._mixtures = checkpoints.parent / MIXTURES
        self._sources = [checkpoints] if config.mix == 1 else [checkpoints, self._mixtures]
        self._begun: int | None = None
        """The version that was due when it began: whoever did not save it then is not blamed."""
        key, self._path = "reference.path" if config.path else "model.path", config.path or model_path
        check_vocabulary(model_path, self._path, key)
        devices = devices_of(config.device, config.gpus, "reference.device", "reference.gpus")
        self._frozen = FrozenModel(
            self._path, dtype, devices, config.tokens_per_batch, key, "reference.gpus", head_dtype, quantized
        )

    def room(self, in_hand: int) -> int:
        """See `ReferenceConfig.groups_in_hand`."""
        return self._config.groups_in_hand - in_hand

    def score(self, tasks: Sequence[ScoringTask], answer: Answer) -> Sequence[ScoringTask]:
        """Answers as many as fill a forward pass, before it returns."""
        count = 1 if self._alone else self._frozen.at_once([task.group for task in tasks])
        batch = [task for task in tasks[:count] if self._reads(task, answer)]
        if not batch:
            return tasks[count:]
        self._refresh(max(task.step for task in batch))
        rows = iter(self._logprobs([task.group for task in batch]))
        for task in batch:
            answer(task, REFERENCE, np.concatenate([next(rows) for _ in task.group.trajectories]))
        return tasks[count:]

    def _reads(self, task: ScoringTask, answer: Answer) -> bool:
        """The model knows its tokens; where not, that is the answer."""
        try:
            self._frozen.check(task.group)
        except (ExperienceError, PictureError) as error:
            answer(task, REFERENCE, unusable=str(error))
            return False
        return True

    def gauges(self) -> dict[str, float]:
        """Which version of the policy it is, where that changes."""
        return {"reference_version": float(self._version)} if self._config.refresh_every else {}

    def _refresh(self, step: int) -> None:
        """Takes the newest checkpoint that is due once ``step`` steps are committed. Raises `SetupError` where one has
        been due for as long again and is not there."""
        every = self._config.refresh_every
        if not every:
            return
        due = step // every * every
        self._begun = due if self._begun is None else self._begun
        there = {version for folder in self._sources for version in checkpoint_folders.versions(folder)}
        found = sorted(version for version in there if version % every == 0)
        newest = max((version for version in found if version <= due), default=0)
        if newest < due and self._config.mix < 1:  # others may have gone on, and left it behind
            newest = min((v for v in checkpoint_folders.versions(self._mixtures) if v > due), default=newest)
        if newest > self._version:
            health.beat()
            version, path = self._become(newest, found)
            self._frozen.become(str(path), "reference.refresh_every")
            self._version = version
            log.info("the reference is refreshed", version=version)
        elif due - max(self._version, self._begun) > every:
            raise SetupError(
                f"reference.refresh_every={every}: after {step} steps {self._checkpoints} has no checkpoint of version "
                f"{due}; the reference must see the run's folder (one file system for all)"
            )

    def _become(self, newest: int, found: list[int]) -> tuple[int, Path]:
        """The version that it takes, ``newest`` of those that were ``found``, and the folder of what it then is."""
        if self._config.mix == 1:
            return newest, checkpoint_folders.path_of(self._checkpoints, newest)
        return mix_up_to(newest, found, self._checkpoints, self._mixtures, self._path, self._config.mix)

    def sleep(self) -> None:
        """Gives its devices' memory back."""
        self._frozen.sleep()

    def wake(self) -> None:
        """Takes its place on its devices again."""
        self._frozen.wake()

    def close(self) -> None:
        """Nothing was started."""

    def _logprobs(self, batch: list[Group]) -> list[np.ndarray]:
        """For each trajectory, float32 ``[tokens]``: 0 where nothing was sampled."""
        model = self._frozen.model
        return self._frozen.of_each(batch, lambda _, rows: logprobs(model, rows, self._temperature))


def make(context: ActorContext, config: Any, kind: str) -> ScorerActor:
    """The actor, for a run's whole config."""
    torch.set_num_threads(context.threads)
    if config.run.deterministic:
        determinism.pin(context.folder, kind, context.threads)
    temperature, turn = config.rollout.sampling.temperature, None
    if config.run.colocated:
        turn = device_turn.enter(context.folder, context.name, config.reference.device, config.reference.gpus)
    reference = Reference(
        config.reference,
        context.model_path,
        config.model.dtype,
        temperature,
        config.run.deterministic,
        context.folder / "checkpoints",
        config.model.head_dtype,
        Adapter.of(lora) if (lora := config.reference_quantized) else None,
    )
    guest = Guest(turn, reference.sleep, reference.wake) if turn else None
    return ScorerActor(kind, context, reference, guest)
