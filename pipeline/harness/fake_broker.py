"""A broker that only passes on what the weight channel says: for measuring and testing the channel alone."""

from __future__ import annotations

from penstock.pipeline.harness.answering import AnsweringBroker
from penstock.protocols import messages as m


class FakeBroker(AnsweringBroker):
    """Tells the trainer which rollouts are there and what they serve. Runs in a thread, until `close`."""

    def __init__(self) -> None:
        self.serves: dict[str, tuple[int, str]] = {}
        self.muted: set[str] = set()
        """Rollouts that hear nothing."""
        self.failures: list[m.LoadFailed] = []
        self.loads: list[m.Loaded] = []
        self.costs: dict[int, m.PublishCost] = {}
        self._trainer: str | None = None
        self._changed = True
        super().__init__()

    def bury(self, identity: str) -> None:
        """A rollout is found dead."""
        self.serves.pop(identity, None)
        self._changed = True

    def turn(self) -> None:
        """Tells the trainer who is here, where that has changed."""
        if self._changed and self._trainer:
            self._changed = False
            self.router.send(self._trainer, m.Receivers(serves=dict(self.serves)))

    def answer(self, identity: str, message: m.Message) -> m.Message:
        """As the broker would."""
        if isinstance(message, m.Hello) and message.kind == "trainer":
            self._trainer, self._changed = identity, True
        elif isinstance(message, m.Hello):
            self.serves[identity], self._changed = (-1, ""), True
        elif isinstance(message, m.Bye):
            self.bury(identity)
        elif isinstance(message, m.Invite | m.Propose | m.CommitVersion):
            for target in set(message.targets) & self.serves.keys() - self.muted:
                self.router.send(target, message)
            return m.Relayed(absent=[target for target in message.targets if target not in self.serves])
        elif isinstance(message, m.Published):
            self.costs[message.version] = message.cost
        elif isinstance(message, m.Reach | m.Loaded | m.LoadFailed) and self._trainer:
            report = message.model_copy(update={"receiver": identity})
            if isinstance(report, m.Loaded):
                self.loads.append(report)
                if identity in self.serves:
                    self.serves[identity], self._changed = (report.version, report.digest), True
            elif isinstance(report, m.LoadFailed):
                self.failures.append(report)
            self.router.send(self._trainer, report)
        return m.Ack()
