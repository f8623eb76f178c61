"""The reference actor: groups in, log-probabilities of their sampled tokens under a frozen model out."""

from __future__ import annotations

import queue

import numpy as np
import structlog
import torch

from penstock.protocols.experience import ExperienceError, Group, unpack_group
from penstock.protocols.mailbox import FencedError
from penstock.protocols.messages import Credit, HelloNeeded, Referenced, ReferenceScore, Stop, Work, WorkItem
from penstock.protocols.wire import WireError
from penstock.services.modeling import determinism
from penstock.services.modeling.load import device_of, load_model
from penstock.services.modeling.logprobs import logprobs, shares_prompts
from penstock.services.modeling.packing import plan_rows
from penstock.services.reference.config import ReferenceConfig
from penstock.services.runtime import health
from penstock.services.runtime.actor import Actor, ActorContext

log = structlog.get_logger()

ANSWER_DEADLINE_S = 60.0


class Reference:
    """One reference process. `run` returns the reason it ended for."""

    def __init__(
        self,
        place: ActorContext,
        config: ReferenceConfig,
        model_path: str,
        dtype: str,
        temperature: float,
        deterministic: bool = False,
    ) -> None:
        torch.set_num_threads(place.threads)
        if deterministic:
            determinism.pin(place.folder, "reference", place.threads)
        self._alone = deterministic
        self.actor = Actor("reference", place)
        self._config, self._temperature = config, temperature
        self._device = device_of(config.device)
        self._model = load_model(config.path or model_path, dtype, self._device).eval()
        self._received = self._hello = 0

    def run(self) -> str:
        """Scores until it is told to stop."""
        self.actor.join()
        self._hello = self.actor.hellos
        self._give_credit()
        while True:
            items: list[WorkItem] = []
            event: object = self.actor.next()
            while event is not None:
                if isinstance(event, Stop):
                    self.actor.leave(event.reason)
                    return event.reason
                if isinstance(event, FencedError):
                    raise event
                if isinstance(event, HelloNeeded):
                    self._received, self._hello = 0, self.actor.hellos
                    self._give_credit()
                elif isinstance(event, Work):
                    items += event.items
                try:
                    event = self.actor.mailbox.inbox.get_nowait()
                except queue.Empty:
                    event = None
            if items:
                self._received += len(items)
                with self.actor.busy():
                    self._score(items)
                self.actor.held.difference_update(item.number for item in items)
                self._give_credit()

    def _give_credit(self) -> None:
        self.actor.mailbox.tell(Credit(total=self._received + self._config.groups_in_hand, hello=self._hello))

    def _score(self, items: list[WorkItem]) -> None:
        groups = []
        for item in items:
            try:
                groups.append(unpack_group(item.experience.data))
            except (ExperienceError, WireError) as error:
                log.error("a group cannot be read", group=item.number, error=str(error))
        # A group's numbers may depend on what else is in its batch, in the last bit: deterministic runs batch nothing.
        batches = [[group] for group in groups] if self._alone else [groups]
        columns = (column for batch in batches for column in self._columns(batch))
        scores = [
            ReferenceScore(number=g.number, logprobs=np.concatenate([next(columns) for _ in g.trajectories]))
            for g in groups
        ]
        self.actor.mailbox.ask_later(Referenced(scores=scores), ANSWER_DEADLINE_S)

    @torch.inference_mode()
    def _columns(self, batch: list[Group]) -> list[np.ndarray]:
        """For each trajectory, float32 ``[tokens]``: 0 where nothing was sampled."""
        trajectories = [trajectory for group in batch for trajectory in group.trajectories]
        groups = [group.number for group in batch for _ in group.trajectories]
        columns = [np.zeros(len(t.tokens), np.float32) for t in trajectories]
        share = shares_prompts(self._model)
        for rows in plan_rows(trajectories, groups, self._config.tokens_per_batch, self._device, share):
            health.beat()
            found = logprobs(self._model, rows, self._temperature).cpu().numpy()
            for k, index in enumerate(rows.index):
                columns[index][1:] = found[k, : len(columns[index]) - 1]
        return columns
