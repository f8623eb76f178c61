"""What one should look at in a run that has ended, however well it ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.pipeline.config import Config
from penstock.services.environments.config import key_of

Rows = Sequence[dict[str, Any]]

LAST = 10
"""What is said of the end of a run is said of so many steps."""
LOST = 0.2
"""Of what evaluations gained at most, so much is a good part."""
OFTEN = 0.05
"""A smaller share of steps above a bound is not worth a word."""
SCALED = 256.0
"""In fp16 a smaller loss scale is worth a word: a run begins with 65,536."""
SOLVED = 0.9
"""Where so many of a step's groups have right answers alone, little is left to learn."""


def findings(config: Config | None, state: dict[str, Any], steps: Rows, drops: Rows) -> list[str]:
    """A sentence each, the gravest first: ``state`` is `protocols.messages.Status`, ``steps`` the rows of the steps,
    ``drops`` those of the dropped groups."""
    trackers = [
        f"run.trackers: {name} failed when the run ended ({words}); what it may lack is in metrics.jsonl"
        for name, words in state.get("trackers", {}).items()
    ]
    trackers += [
        f"{learner}.checkpoint.then failed for {words}; what it said is in logs/{learner}.then, and it is tried again "
        "when the run is resumed"
        for learner, words in state.get("then_failed", {}).items()
    ]
    learned = [*_learned(state, steps), *other_store(state)]
    if back := state["totals"].get("rolled_back"):
        learned.append(f"it was taken back to version {back} (penstock rollback): totals are of what came after")
    best = [*_best(config, state)] if config else []
    return [*learned, *best, *_rewards(state), *_prompts(state, drops), *_answers(config, steps), *trackers]


def _best(config: Config, state: dict[str, Any]) -> Iterator[str]:
    """A sentence where the run has lost a good part of what it had gained, and the policy that had it."""
    best, scores = state.get("best"), state.get("evaluations", {})
    before, after = scores.get("before"), scores.get("after")
    if not best or config.prompts.best_by or None in (before, after) or state["evaluated_after"] != state["step"]:
        return
    if best["score"] - after > LOST * abs(best["score"] - before) and not config.trainer.checkpoint.keep_best:
        yield (
            f"its evaluation fell from {best['score']:.4g} after step {best['step']} to {after:.4g}, and of that step "
            "there may be no checkpoint; trainer.checkpoint.keep_best=true keeps it"
        )


def other_store(state: dict[str, Any]) -> Iterator[str]:
    """A sentence where the run went on in a store that did not know it."""
    if done := state["totals"].get("not_in_store"):
        yield (
            f"store.url: the store knew nothing of the {done} steps that were done when the run went on: it was "
            "emptied, or is another one; what waited there is generated again, and totals begin anew"
        )


def _learned(state: dict[str, Any], steps: Rows) -> Iterator[str]:
    skipped = [row for row in steps if row.get("skipped", 0) >= 1]  # not in a part of its updates alone
    if skipped:
        which = "every step was" if len(skipped) == len(steps) else f"{len(skipped)} of {len(steps)} steps were"
        yield (
            f"{which} skipped, since loss or gradient were not finite, and changed no weight; the last one was step "
            f"{skipped[-1]['step']} (loss {skipped[-1]['loss']}, gradient norm {skipped[-1]['grad_norm']})"
        )
    elif steps and not any(row.get("grad_norm") for row in steps):
        yield "nothing was learned: the gradient was 0 in every step"
    if steps and steps[-1].get("loss_scale", SCALED) < SCALED:
        yield (
            f"model.dtype=float16: the loss scale fell to {steps[-1]['loss_scale']:g}, and small gradients are lost "
            "below it: some had no room at any scale; look for what makes these (a loss of your own?), or take bfloat16"
        )
    yield from _without_variance(state, steps)
    if state["phase"] == "done" and state["step"] < state["steps"]:
        why = state.get("early") or "the prompts ended (prompts.epochs, prompts.train)"
        yield f"the run ended after {state['step']} of {state['steps']} steps: {why}"


def _without_variance(state: dict[str, Any], steps: Rows) -> Iterator[str]:
    """At most one: where most groups taught nothing, but not where that is since the run has ended well."""
    trained, flat = state["totals"]["trained"], state["totals"]["groups_without_variance"]
    solved = min(flat, round(sum(map(_solved, steps))))
    most = sum(row.get("solved_all", 0) >= SOLVED for row in steps) > len(steps) / 2
    given, stuck = any(row.get("given_tokens") for row in steps), flat - solved > (trained - solved) / 2
    if not trained or flat <= trained / 2 or not (stuck or most):
        return
    words = f"{flat} of {trained} trained groups had answers of equal reward, from which nothing is learned"
    words += " of the policy's own" * given
    if not stuck:
        yield (
            f"{words}: {solved} of them had the highest reward of their step. The task is learned, and fewer steps "
            "would do, or the prompts are too easy, or the reward does not tell answers apart"
        )
        return
    right = f" ({solved} of them since all were right)" * (solved > 0)
    remedy = "" if given else "; replay.filter=zero_variance generates others instead"
    yield f"{words}{right}: the prompts are too easy or too hard, or the reward does not tell answers apart{remedy}"


def _solved(row: dict[str, Any]) -> float:
    """Groups of a step with right answers alone."""
    right, stuck = row.get("solved_all", 0.0), row.get("solved_none", 0.0)
    return row.get("groups_without_variance", 0.0) * right / (right + stuck) if right else 0.0


def _rewards(state: dict[str, Any]) -> Iterator[str]:
    for said in state["rewards"].values():
        if said["failed"]:
            told = "; the last: " in said["words"]  # as of agents
            last = f"; the last one {said['last'].partition(' ')[2]}" if said["last"] and not told else ""
            yield f"{said['source']}: {said['words']}{last}"


def _prompts(state: dict[str, Any], drops: Rows) -> Iterator[str]:
    kinds = Counter(row.get("kind") for row in drops)
    words = {
        "prompt": "prompts were dropped, since they cannot be used",
        "reward": "groups were dropped, since too few of their answers had a reward",
        "unusable": "groups were dropped, since a scorer cannot score them",
        "unanswered": "groups were dropped, since nobody answered them",
    }
    for kind, what in words.items():
        if kinds[kind]:
            last = next(row["reason"] for row in reversed(drops) if row.get("kind") == kind)
            yield f"{kinds[kind]} {what}; the last one: {last}"
    if left_out := state["totals"].get("eval_left_out"):
        yield (
            f"{left_out} evaluations were left out, since the one before was still under way: prompts.eval_every is "
            "too small for prompts.eval_size"
        )
    if unusable := state["totals"]["eval_unusable"]:
        yield (
            f"{unusable} times an evaluation prompt had no reward, and no part in its evaluation; logs/broker.jsonl "
            "and the logs of the rewards say why"
        )


def _answers(config: Config | None, steps: Rows) -> Iterator[str]:
    last = [row["finished_share"] for row in steps[-LAST:] if "finished_share" in row]
    if last and sum(last) / len(last) < 0.5:
        share = 100 * (1 - sum(last) / len(last))
        where = f" {_where(config, steps)}" if config else ""
        yield f"{share:.0f} % of the last steps' answers were cut off{where}"
    yield from far_apart(steps, OFTEN * max(1, len(steps)), f"{len(steps)} steps")


def _where(config: Config, steps: Rows) -> str:
    """What may have cut answers off, the likeliest first."""
    played, new = config.rollout.all_environments, config.rollout.sampling.max_new_tokens
    room = "where rollout.engine.max_length has no room for more"
    if not played and not config.gateway.count:  # a prompt that leaves less room is dropped
        return f"at rollout.sampling.max_new_tokens={new}" if new else room
    turns = [row["turns"] for row in steps[-LAST:] if "turns" in row]
    found = [f"at {key_of(source)}.max_turns={each.max_turns}" for source, each in played.items()]
    if played and turns:
        found[-1] += f" (they had {sum(turns) / len(turns):.1f} turns in the mean)"
    found += [f"at rollout.sampling.max_new_tokens={new} in the last turn"] * bool(new)
    return ", or ".join([*found, room, *["where their agents say so"] * bool(config.gateway.count)])


def far_apart(steps: Rows, more_than: float, among: str) -> Iterator[str]:
    """One sentence where in ``more_than`` so many of ``steps`` the trainer was too far from what engines had reported:
    whether they disagree, or the policy had moved on. ``among``: which steps, in words. It reads of a row
    ``mismatch_kl_k3``, ``mismatch_fresh_kl_k3`` and ``mismatch_bound``."""
    far = [row for row in steps if row.get("mismatch_kl_k3", 0.0) > row.get("mismatch_bound", float("inf"))]
    if len(far) <= more_than:
        return
    by_rounding = [row["mismatch_fresh_kl_k3"] > row["mismatch_bound"] for row in far if "mismatch_fresh_kl_k3" in row]
    which = f"in {len(far)} of {among} (mismatch_kl_k3 above trainer.mismatch_warning)"
    nearer, closer = "a lower gate.max_lag or trainer.optimizer.lr", "penstock doctor engine FILE looks closer"
    if not by_rounding:
        yield (
            f"the trainer was far from what engines had reported {which}, and no token there was of its own version, "
            f"which would tell lag from rounding: {nearer} helps against lag; {closer} at the engine"
        )
    elif sum(by_rounding) > len(by_rounding) / 2:
        yield f"engines and trainer disagreed {which}, at lag 0 too; {closer}"
    else:
        yield f"the policy had moved far from the versions that wrote the tokens {which}: {nearer} keeps it nearer"
