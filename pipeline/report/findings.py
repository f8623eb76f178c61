"""What one should look at in a run that has ended, however well it ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]

LAST = 10
"""What is said of the end of a run is said of so many steps."""
OFTEN = 0.05
"""A smaller share of steps above a bound is not worth a word."""


def findings(state: dict[str, Any], steps: Rows, drops: Rows) -> list[str]:
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
    return [*learned, *_rewards(state), *_prompts(state, drops), *_answers(state, steps), *trackers]


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
    trained, flat = state["totals"]["trained"], state["totals"]["groups_without_variance"]
    if trained and flat > trained / 2 and any(row.get("given_tokens") for row in steps):
        yield (
            f"{flat} of {trained} trained groups had answers of equal reward, from which nothing is learned of the "
            "policy's own: the prompts are too easy or too hard for it, or the reward does not tell answers apart"
        )
    elif trained and flat > trained / 2:
        yield (
            f"{flat} of {trained} trained groups had answers of equal reward, from which nothing is learned: the "
            "prompts are too easy or too hard, or the reward does not tell answers apart; replay.filter=zero_variance "
            "generates others instead"
        )
    if state["phase"] == "done" and state["step"] < state["steps"]:
        why = state.get("early") or "the prompts ended (prompts.epochs, prompts.train)"
        yield f"the run ended after {state['step']} of {state['steps']} steps: {why}"


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


def _answers(state: dict[str, Any], steps: Rows) -> Iterator[str]:
    last = [row["finished_share"] for row in steps[-LAST:] if "finished_share" in row]
    if last and sum(last) / len(last) < 0.5:
        share = 100 * (1 - sum(last) / len(last))
        at = "rollout.sampling.max_new_tokens, or at rollout.engine.max_length"
        if steps[-1].get("turns"):  # a trajectory of several may also end before its task does
            at += ", or, of an environment, at rollout.environment.max_turns"
        yield f"{share:.0f} % of the last steps' answers were cut off at {at}"
    yield from far_apart(steps, OFTEN * max(1, len(steps)), f"{len(steps)} steps")


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
