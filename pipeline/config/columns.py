"""Which columns a config's choices read, and whether somebody writes them."""

from __future__ import annotations

from typing import Any

from penstock.protocols.columns import (
    FIELDS,
    GIVEN,
    METRICS,
    OF_CRITIC,
    PROCESS,
    REFERENCE,
    REWARD,
    SOURCE,
    VALUES,
    ColumnTable,
    top_of,
)
from penstock.services.broker.rules.evaluation import pass_at
from penstock.services.runtime import registry
from penstock.services.runtime.custom_scorer import SERVED, TEACHERS
from penstock.services.runtime.nearest import nearest

TAUGHT_BY = "trainer.algorithm.distill.teachers"
"""The key that names whose whole distribution is learned."""
ADVANTAGE_BY = "trainer.algorithm.teacher_advantage.teachers"
"""The key that names who adds to each token's advantage."""


def columns_read(config: Any) -> dict[str, str]:
    """Every column that something reads, with the config key that says so."""
    found = {} if config.rollout.all_given else {REWARD: "trainer.algorithm.advantage"}
    algorithm = config.trainer.algorithm
    for choice in ("advantage", "loss", "correction"):
        for name in getattr(getattr(algorithm, choice), "columns", ()):
            found[name] = f"trainer.algorithm.{choice}.columns"
    if PROCESS in found and PROCESS not in _declared(config):  # which a critic makes of them
        found[REFERENCE] = found[PROCESS]
    if algorithm.teacher_advantage:
        found |= dict.fromkeys(algorithm.teacher_advantage.teachers, ADVANTAGE_BY)
    if algorithm.kl.coefficient > 0:
        found[REFERENCE] = "trainer.algorithm.kl.coefficient"
    if algorithm.distill:
        found |= dict.fromkeys(algorithm.distill.teachers, TAUGHT_BY)
    for index, constraint in enumerate(algorithm.constraints):
        found[constraint.column] = f"trainer.algorithm.constraints.{index}.column"
    for index, function in enumerate(config.reward.functions):
        found |= dict.fromkeys(function.columns, f"reward.functions.{index}.columns")
    found |= dict.fromkeys(config.reward.columns, "reward.columns")
    for kind, scorer in config.scorers.items():
        found |= dict.fromkeys(scorer.reads, f"scorers.{kind}.reads")
    if config.replay.filter.type != "none":
        found.setdefault(config.replay.filter.column, "replay.filter.column")
    if config.prompts.curriculum:
        found.setdefault(config.prompts.curriculum.column, "prompts.curriculum.column")
    for name, how in config.prompts.eval_sampling.items():
        found.setdefault(how.column, f"prompts.eval_sampling.{name}.column")
    return found


def critic_column(config: Any) -> str | None:
    """What a critic is read for: its values, or PRIME's process rewards, unless a scorer writes a column called so;
    None: there is none."""
    read, declared = columns_read(config), _declared(config)
    return next((name for name in OF_CRITIC if name in read and (name == VALUES or name not in declared)), None)


def _declared(config: Any) -> set[str]:
    return {name for scorer in config.scorers.values() for name in scorer.columns}


def check_columns(config: Any) -> None:
    """Raises `ValueError` where a scorer's or a column's name is taken, where nobody writes what is read, or where
    columns wait for each other."""
    built_in = registry.actors(config.model_copy(update={"scorers": {}})).keys() | {"observer"}
    for kind in config.scorers:
        if kind in built_in or not kind.replace("_", "").isalnum():
            raise ValueError(f"scorers.{kind}: the name is taken, or has other signs than letters, digits and _")
        told = _teachers_temperature(config.scorers[kind])
        if told is not None and told != (ours := config.rollout.sampling.temperature):
            says, remedy = f"scorers.{kind}.options.temperature={told:g}", "leave it out"
            if config.scorers[kind].scorer == SERVED:
                says = f"scorers.{kind}: a served_teacher says log-probabilities at temperature 1, which"
                remedy = "set that to 1, or take a teacher with a path"
            raise ValueError(
                f"{says} is not rollout.sampling.temperature={ours:g}: teacher and policy would be compared at two "
                f"temperatures; {remedy}"
            )
    table: ColumnTable = config.columns
    names = [column.name for column in table.columns] + [total.name for total in table.sums]
    own = [REFERENCE] * config.reference.in_trainer  # which no scorer writes
    names, by_token = names + own, table.by_token | set(own)
    for kind, scorer in config.scorers.items():
        for name in scorer.columns:
            if name in METRICS:
                raise ValueError(
                    f"scorers.{kind}.columns: {name!r} is a metric of every step; call the column otherwise"
                )
            if name in FIELDS:
                raise ValueError(
                    f"scorers.{kind}.columns: {name!r} is in the row of every trajectory; call the column otherwise"
                )
            if name in GIVEN:
                raise ValueError(
                    f"scorers.{kind}.columns: {name!r} is what built-in algorithms are given; call the column otherwise"
                )
            if top_of(name) is not None:
                raise ValueError(
                    f"scorers.{kind}.columns: {name!r} is what a teacher's top_k is called; call the column otherwise"
                )
            if names.count(name) > 1:
                raise ValueError(
                    f"scorers.{kind}.columns: {name!r} is written by another scorer too; call it otherwise"
                )
    for name, key in columns_read(config).items():
        if name not in names:
            if name in OF_CRITIC:
                raise ValueError(
                    f"{key}: a critic says values or process rewards, and both are read; take one of the two"
                )
            raise ValueError(f"{key}: no scorer writes a column {name!r}; {nearest(name, names)}")
        if top_of(name) is not None:
            raise ValueError(f"{key}: {name} is read by trainer.algorithm.distill alone, which names {top_of(name)}")
    for name in config.reward.columns:
        if (column := table.by_name.get(name)) is None or column in table.of_step:
            weight = "a function's weight is reward.functions.N.weight"
            raise ValueError(f"reward.columns: {name} is no scorer's column, which alone may be added here; {weight}")
    _check_teachers(config)
    if any(not total.terms for total in table.sums):
        raise ValueError(
            "reward.functions: every weight is 0, so that there is no reward to train on; give one another weight "
            "(where the algorithm reads none, any will do), or name a scorer's column in reward.columns"
        )
    by_token_alone = by_token - {term for total in table.sums for term in total.terms}
    _check_shapes(config.trainer.algorithm, by_token, by_token_alone)
    for index, constraint in enumerate(config.trainer.algorithm.constraints):
        if constraint.column in by_token_alone:
            raise ValueError(
                f"trainer.algorithm.constraints.{index}.column: {constraint.column} has a value for each token, and a "
                "cost one for each trajectory"
            )
    _check_order(table)
    rule, rests = config.replay.filter, config.prompts.curriculum
    before = {"replay.filter.column": rule.column} if rule.type != "none" else {}
    before |= {"prompts.curriculum.column": rests.column} if rests else {}
    for key, name in before.items():
        if name in {column.name for column in table.of_step}:
            raise ValueError(
                f"{key}: {name} is written when a step has taken the group, and groups are looked at before; take a "
                "reward's column, or a scorer's"
            )
    _check_evaluated(config.prompts, table)


def _check_teachers(config: Any) -> None:
    """Raises `ValueError` where one whose whole distribution is learned does not say it."""
    distill = config.trainer.algorithm.distill
    for name in distill.teachers if distill else ():
        if name not in config.columns.tops:
            kind = next((c.scorer for c in config.columns.columns if c.name == name), "")
            scorer = config.scorers.get(kind)
            remedy = "name one of a scorer teacher with the option top_k"
            if scorer and scorer.scorer in TEACHERS:
                remedy = f"set scorers.{kind}.options.top_k, e.g. to 64"
                if scorer.options.get("top_k"):  # it says so, of a column of another name
                    remedy = f"set scorers.{kind}.options.column={name}, by which it writes"
            raise ValueError(f"{TAUGHT_BY}: {name} says nothing of tokens that were not sampled; {remedy}")
        if name not in config.columns.by_token:
            raise ValueError(
                f"{TAUGHT_BY}: {name} has a value for each trajectory, and a teacher one for each token; write "
                f"scorers.….columns: {{{name}: token}}"
            )


def _check_evaluated(prompts: Any, table: ColumnTable) -> None:
    """Raises `ValueError` where an evaluation is to be told by what it has not."""
    there = [total.name for total in table.sums]
    there += [column.name for column in table.columns if column.evaluated and column.per != "sampled"]
    for name, how in prompts.eval_sampling.items():
        if how.column not in there:
            raise ValueError(
                f"prompts.eval_sampling.{name}.column: {how.column} is not asked for in evaluations; there are "
                f"{', '.join(there)}"
            )
    name, told = prompts.best_set, prompts.best_part
    if told:
        n = prompts.eval_sampling[name].n if name in prompts.eval_sampling else 1
        there += ["response_tokens", "finished_share", *([*pass_at(n, 0), f"maj@{n}"] if n > 1 else [])]
        by_source = told.startswith(SOURCE)  # which there are the data alone say
        if (told not in there and not by_source) or name not in prompts.eval:
            of_set = (
                f"of {name} there are {', '.join(there[1:])}" if name in prompts.eval else f"{name} has a loss alone"
            )
            raise ValueError(f"prompts.best_by: no evaluation tells {prompts.best_by!r}; {of_set}")


def _teachers_temperature(scorer: Any) -> float | None:
    """At which a built-in teacher is told to score; None where it is not, and of any other scorer."""
    if scorer.scorer == SERVED:
        return 1.0
    told = scorer.options.get("temperature") if scorer.scorer == "teacher" else None
    return None if told is None else float(told)


def _check_shapes(algorithm: Any, by_token: set[str], by_token_alone: set[str]) -> None:
    """``by_token_alone``: columns that are no term of the reward, which would have their sum by trajectory too."""
    advantage = algorithm.advantage
    if advantage.type == "gdpo" and (wrong := by_token_alone.intersection(advantage.columns)):
        raise ValueError(
            f"trainer.algorithm.advantage.components: {min(wrong)} has a value for each token; gdpo compares "
            "trajectories"
        )
    if advantage.type == "rae" and advantage.role in by_token:
        raise ValueError(
            f"trainer.algorithm.advantage.role: {advantage.role} has a value for each token, and a role is one of a "
            "trajectory"
        )
    taught = {"trainer.algorithm.advantage.teachers": advantage.columns} if advantage.type == "distillation" else {}
    taught |= {ADVANTAGE_BY: algorithm.teacher_advantage.teachers} if algorithm.teacher_advantage else {}
    for key, teachers in taught.items():
        if wrong := set(teachers) - by_token:
            raise ValueError(
                f"{key}: {min(wrong)} has a value for each trajectory; a teacher has a log-probability for each token"
            )


def _check_order(table: ColumnTable) -> None:
    late = {column.name for column in table.of_step}
    for column in table.scored:
        if found := late.intersection(column.reads):
            raise ValueError(
                f"{column.name} reads {', '.join(found)}, which is written when a step has taken the group: only an "
                "advantage, a loss or a correction may read it"
            )
    known = {total.name for total in table.sums}
    left = dict(table.by_name)
    while ready := [name for name, column in left.items() if known.issuperset(column.reads)]:
        known.update(ready)
        for name in ready:
            del left[name]
    if left:
        waits = "; ".join(f"{name} reads {', '.join(column.reads)}" for name, column in left.items())
        raise ValueError(f"columns that wait for each other can never be written: {waits}")
