"""The reward actor: groups in, a reward for each trajectory out."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import structlog

from penstock.protocols.experience import ExperienceError, Group, unpack_group
from penstock.protocols.mailbox import FencedError
from penstock.protocols.messages import Credit, HelloNeeded, Score, Scored, Stop, Work
from penstock.protocols.wire import WireError
from penstock.services.reward.config import RewardConfig
from penstock.services.reward.pool import Item, Pool
from penstock.services.runtime import health
from penstock.services.runtime.actor import Actor, ActorContext

log = structlog.get_logger()

ANSWER_DEADLINE_S = 60.0


class Reward:
    """One reward process. `run` returns the reason it ended for."""

    def __init__(self, place: ActorContext, config: RewardConfig) -> None:
        self.actor = Actor("reward", place)
        self._config = config
        self._pool = Pool(config.functions, config.workers)
        self._received = self._hello = 0
        self._errors = 0

    def run(self) -> str:
        """Scores until it is told to stop."""
        self.actor.join()
        self._hello = self.actor.hellos
        self._give_credit()
        while True:
            event = self.actor.next()
            if isinstance(event, Stop):
                break
            if isinstance(event, FencedError):
                raise event
            if isinstance(event, HelloNeeded):
                self._received, self._hello = 0, self.actor.hellos
                self._give_credit()
            elif isinstance(event, Work):
                self._received += len(event.items)
                with self.actor.busy():
                    self._score(event)
                self.actor.held.difference_update(item.number for item in event.items)
                self._give_credit()
            else:
                log.warning("unexpected message", type=type(event).__name__)
        self._pool.close()
        self.actor.leave(event.reason)
        return event.reason

    def _give_credit(self) -> None:
        self.actor.mailbox.tell(Credit(total=self._received + self._config.groups_in_hand, hello=self._hello))

    def _score(self, work: Work) -> None:
        """Scores all groups of ``work`` together, so that the workers always have enough to do."""
        calls: list[tuple[int, list[list[Item]]]] = []
        for item in work.items:
            try:
                group = unpack_group(item.experience.data)
            except (ExperienceError, WireError) as error:
                log.error("a group cannot be read", group=item.number, error=str(error))
                continue
            calls.append((item.number, self._calls(group)))
        self._pool.submit([call for _, rows in calls for row in rows for call in row])
        scores = [self._collect(number, rows) for number, rows in calls]
        self.actor.gauges = {"reward_errors": self._errors, "worker_restarts": self._pool.restarts}
        self.actor.mailbox.ask_later(Scored(scores=scores), ANSWER_DEADLINE_S)

    def _calls(self, group: Group) -> list[list[Item]]:
        """For each trajectory, one call for each function."""
        prompt = group.prompt.as_text()
        return [
            [Item(f, t.text, group.prompt.truth, prompt, Future()) for f in range(len(self._config.functions))]
            for t in group.trajectories
        ]

    def _collect(self, number: int, rows: list[list[Item]]) -> Score:
        rewards = np.full(len(rows), np.nan, np.float32)
        errors: list[str | None] = [None] * len(rows)
        for index, row in enumerate(rows):
            health.beat()
            failures = {self._config.functions[i.function].function: i.future.exception() for i in row}
            failed = [f"{name} {error}" for name, error in failures.items() if error]
            if failed:
                errors[index] = "; ".join(failed)
                self._errors += 1
                log.warning("reward failed", group=number, trajectory=index, error=errors[index])
            else:
                rewards[index] = sum(self._config.functions[i.function].weight * i.future.result() for i in row)
        return Score(number=number, rewards=rewards, errors=errors)
