"""The one table of actors: what serve, launch, plan, placement and the broker know of each kind.

A new actor is a folder with a `spec.py`, and a line in `SPECS`. A new scorer of the user's own is neither: the config's
``scorers`` names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.protocols.columns import Column, ColumnTable, WeightedSum
from penstock.services.runtime.actor import STOP_GRACE_S
from penstock.services.runtime.plugins import load_plugin

LEARNERS_GRACE_S = float(os.environ.get("PENSTOCK_TERM_S", 600.0))
"""How long a learner that is told to leave may take for the step in hand, and a checkpoint of it."""
SPECS = (
    "penstock.services.broker.spec:SPEC",
    "penstock.services.trainer.spec:SPEC",
    "penstock.services.rollout.spec:SPEC",
    "penstock.services.reward.spec:SPEC",
    "penstock.services.reference.spec:SPEC",
    "penstock.services.critic.spec:SPEC",
    "penstock.services.gateway.spec:SPEC",
)
CUSTOM = "penstock.services.runtime.custom_scorer:make"


@dataclass(frozen=True)
class ActorSpec:
    """One kind of actor. The functions are given a run's whole config (`pipeline.config.Config`)."""

    kind: str
    make: str
    """``module:function(context, config, kind)`` that returns the actor: it has ``run()`` and ``actor``. Imported in
    the actor's own process alone."""
    count: Callable[[Any], int] = lambda config: 1
    """Processes of it in a run; 0 where it is not needed."""
    threads: Callable[[Any], int] = lambda config: 1
    """Compute threads of one process."""
    ranks: Callable[[Any], int] = lambda config: 1
    """Processes that make one actor, under torchrun."""
    nodes: Callable[[Any], int] = lambda config: 1
    """Machines that these are dealt over."""
    preloaded: Callable[[Any], bool] = lambda config: False
    """Its process begins with torch and transformers: on a CPU it may be forked from one that has loaded them."""
    gpus: Callable[[Any], int] = lambda config: 0
    """GPUs that one process, or all ranks of it, want."""
    columns: Callable[[Any], list[Column]] = lambda config: []
    """What it adds to finished groups, where it is a scorer."""
    sums: Callable[[Any], list[WeightedSum]] = lambda config: []
    """Columns that the broker makes of its columns."""
    learns: bool = False
    """It trains on the ledger's steps, and saves checkpoints: a step is done with when every learner's covers it."""
    unneeded: str = ""
    """Why a run may have none, for people."""
    grace_s: float = STOP_GRACE_S
    """How long one that nobody supervises may take to leave."""
    single: bool = False
    """There is one of it, which is called by its kind alone."""

    def names(self, config: Any) -> list[str]:
        """Of its processes in a run."""
        if self.single:
            return [self.kind] * self.count(config)
        return [f"{self.kind}-{index}" for index in range(self.count(config))]

    def create(self, context: Any, config: Any) -> Any:
        """The actor, in this process."""
        return load_plugin(self.make, f"actor {self.kind}")(context, config, self.kind)


def actors(config: Any) -> dict[str, ActorSpec]:
    """Every kind of actor that a run of ``config`` may have, by name; the broker first."""
    table = {spec.kind: spec for spec in (load_plugin(name, "actors") for name in SPECS)}
    for kind in config.scorers:
        table[kind] = _custom(kind)
    return table


def started_here(config: Any) -> list[ActorSpec]:
    """Those that `penstock run` starts beside the broker; the others join (`run.elsewhere`)."""
    return [spec for spec in actors(config).values() if spec.kind not in ("broker", *config.run.elsewhere)]


def learners(config: Any) -> tuple[str, ...]:
    """Kinds of the actors that train on the steps of a run of ``config``."""
    return tuple(spec.kind for spec in actors(config).values() if spec.learns and spec.count(config))


def columns(config: Any) -> ColumnTable:
    """Every column of a run of ``config``: those of all scorers that it has."""
    scorers = [spec for spec in actors(config).values() if spec.count(config)]
    sums = tuple(total for spec in scorers for total in spec.sums(config))
    found = [column for spec in scorers for column in spec.columns(config)]
    terms = {total.name: tuple(total.terms) for total in sums}
    # Who reads a sum waits for its terms.
    reads = [dict.fromkeys(t for name in column.reads for t in (*terms.get(name, ()), name)) for column in found]
    judged = {term for total in sums for term in total.terms}  # evaluation prompts have a reward too
    waiting = [
        c.model_copy(update={"reads": tuple(names), "evaluated": c.evaluated or c.name in judged})
        for c, names in zip(found, reads, strict=True)
    ]
    return ColumnTable(columns=tuple(waiting), sums=sums)


def _custom(kind: str) -> ActorSpec:
    return ActorSpec(
        kind=kind,
        make=CUSTOM,
        count=lambda config: config.scorers[kind].count,
        threads=lambda config: config.scorers[kind].threads,
        gpus=lambda config: config.scorers[kind].gpus,
        columns=lambda config: config.scorers[kind].declared(kind),
    )
