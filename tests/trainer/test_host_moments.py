"""Means that lie in host memory: the same numbers, bit by bit, whoever saved them, and nobody reads them too early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from penstock.services.learning import checkpoint, host_moments
from penstock.services.learning.config import LearnerConfig
from penstock.services.learning.host_moments import HostAdamW
from penstock.services.learning.optimizer import keeps_on_device, make_optimizer, set_rate
from penstock.services.learning.optimizer_config import OptimizerConfig
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from tests.trainer.rank_program import a_mixture, a_model
from tests.trainer.test_checkpoint import CPU, a_learner, a_step, continues_exactly

PART = 1000
"""Numbers: less than a matrix has, more than a vector."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_moments, "PART_NUMBERS", PART // host_moments.ALIGNED * host_moments.ALIGNED)


def updated(kind: str, on_host: bool, make: Any = a_model) -> tuple[Any, torch.optim.Optimizer]:
    """A model after five updates, of which one parameter has no gradient in the first two."""
    model = make()
    parameters = dict(model.named_parameters())
    config = OptimizerConfig.model_validate({"type": kind, "lr": 1e-2, "weight_decay": 0.1})
    optimizer = make_optimizer(model, parameters, config, World(CPU), on_host)
    random, late = torch.Generator().manual_seed(1), next(name for name in parameters if "layers.1.mlp" in name)
    for update in range(5):
        set_rate(optimizer, 1e-2 / (1 + update))
        for name, parameter in parameters.items():
            gradient = torch.randn(parameter.shape, generator=random)
            parameter.grad = None if name == late and update < 2 else gradient
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("make", [a_model, a_mixture])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_updates_are_those_of_means_on_the_device(kind: str, make: Any) -> None:
    (plain, one), (ours, other) = updated(kind, False, make), updated(kind, True, make)
    assert keeps_on_device(one) and not keeps_on_device(other)
    for (name, theirs), mine in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(theirs, mine), name
        states = one.state[theirs], other.state[mine]
        assert states[0].keys() == states[1].keys(), name
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0]), name


@dataclass
class Played:
    """A queue that is ``eager``, and carries out at once whatever its events allow; or nothing before it must: what an
    event that somebody waits for stands behind."""

    eager: bool
    work: list[Any] = field(default_factory=list)
    current: ClassVar[Played | None] = None
    """Into which work goes that is given now."""

    def put(self, what: Any) -> None:
        what() if self.eager else self.work.append(what)

    def after(self, event: Event) -> None:
        self.put(event.happens)

    def mark(self) -> Event:
        return Event(self, len(self.work))

    @contextmanager
    def running(self) -> Iterator[None]:
        before, Played.current = Played.current, self
        try:
            yield
        finally:
            Played.current = before


@dataclass
class Event:
    queue: Played
    place: int

    def happens(self) -> None:
        """Carries out what lies before it."""
        work = self.queue.work
        for number in range(self.place):
            todo, work[number] = work[number], lambda: None
            todo()

    synchronize = happens


@pytest.mark.parametrize("eager", ["", "come", "update", "go"])
def test_nothing_is_read_before_it_has_come(eager: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies, and updates, that are carried out as late, or as early, as their events allow give the same numbers."""
    wanted, _ = updated("adamw", False)
    copy = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if Played.current is None:
            return copy(self, source)
        Played.current.put(lambda: copy(self, source))
        return self

    change = HostAdamW._change
    update, come, go = (Played(name == eager) for name in ("update", "come", "go"))
    lent = iter([come, go] * 5)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(HostAdamW, "_change", lambda *about: update.put(lambda: change(*about)))
    monkeypatch.setattr(host_moments, "borrow_queue", lambda device: next(lent))
    monkeypatch.setattr(host_moments, "give_back", lambda device, queue: None)
    monkeypatch.setattr(host_moments, "current_queue", lambda device: update)
    found, _ = updated("adamw", True)
    for (name, theirs), mine in zip(wanted.named_parameters(), found.parameters(), strict=True):
        assert torch.equal(theirs, mine), name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_run_goes_on_with_them_and_without(kind: str, tmp_path: Path) -> None:
    saved = continues_exactly(tmp_path, offload="optimizer", type=kind, weight_decay=0.1)
    found = []
    for offload in (False, "optimizer"):
        again = a_learner(load_trainable(str(saved), World(CPU), CPU, "float32"), offload=offload, type=kind)
        checkpoint.restore(again, saved)
        again.train(a_step(9))
        found.append([parameter.detach() for parameter in again.parameters.values()])
    assert all(map(torch.equal, *found))


def test_8_bits_stay_where_they_are() -> None:
    with pytest.raises(ValueError, match=r"offload=optimizer: .* set optimizer\.moments=float32"):
        LearnerConfig.model_validate({"offload": "optimizer", "optimizer": {"moments": "8bit"}})
