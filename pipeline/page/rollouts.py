"""What a run trained on, for the page: groups with their trajectories, token by token where the archive has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Set
from operator import ne
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from penstock.pipeline.config import load
from penstock.pipeline.page.data import evenly
from penstock.pipeline.page.folding import folded
from penstock.pipeline.page.texts import Texts
from penstock.pipeline.page.thumbnails import Thumbnails
from penstock.pipeline.tools.rollouts import by_token_values, of_tokens, readable
from penstock.protocols.experience import ALONE, Group, Trajectory
from penstock.services.broker import archive
from penstock.services.broker.samples import rows
from penstock.services.runtime.lines import each_line
from penstock.services.trainer import judged

log = structlog.get_logger()

TOKENS, GROUPS = 1_000_000, 10_000
"""What a page has, at most."""
LETTERS = 50_000_000
"""Of prompts, truths and answers that it has at most, and of what else is told of an answer."""
ABOUT = 300
"""Letters of the latter, but for why it failed."""
PICTURES = 30_000_000
"""Letters of pictures that it has at most, beside the others."""
TRUTH = 4000
"""Letters of a truth that it has at most."""
NO_TOKENIZER = "no tokens: neither the model's tokenizer.json is on this machine nor a checkpoint's of the run"
NO_ROOM = "no tokens: a page has room for those of newer groups alone"
"""Why an archived group is shown without its tokens."""
STEPS = 40
"""Archived steps that are looked into first, evenly over the run."""


def groups_of(
    folder: Path,
    tokens: int = TOKENS,
    groups: int = GROUPS,
    letters: int = LETTERS,
    pictures: int = PICTURES,
    newest: int = 0,
) -> list[dict[str, Any]]:
    """Groups of archived steps, as many as there is room for, and then those that samples.jsonl has of other steps;
    first of all ``newest`` groups of the last steps, without a gap."""
    config, kept, small = load(folder / "config.yaml"), archive.steps(folder), Thumbnails(folder, pictures)
    found: list[dict[str, Any]] = []
    texts = Texts(config, folder) if kept else None
    for step in _in_turn(kept, found, groups, newest):
        of_trainer = judged.read(folder / "archive", step)
        for group, columns in _of_step(folder, step):
            tokens -= sum(len(trajectory.tokens) - _begin(trajectory) for trajectory in group.trajectories)
            with_text = texts if texts and texts.known and tokens >= 0 else None
            by_token = of_tokens(group, columns, config.columns)
            by_trajectory = by_token_values(group, columns, sorted(by_token), of_trainer.get(group.number, {}))
            flat = {name: values for name, values in columns.items() if name not in by_token}
            shown = _shown(group, flat, step, by_trajectory, with_text)
            if not with_text:
                shown["untold"] = NO_ROOM if texts and texts.known else NO_TOKENIZER
            letters -= _letters_of_group(shown) + _letters(shown["members"])
            if len(found) == groups or (letters < 0 and found):
                return _in_order(found)
            found.append(shown | _seen(small.of(p for each in group.trajectories for p in each.pictures)))
    if len(found) < groups and letters > 0:
        for shown in reversed(_of_samples(folder, groups - len(found), letters, set(kept))):
            names = [name for member in shown["members"] for name in member.get("pictures", ())]
            found.append(shown | _seen(small.of_files(names)))
    return _in_order(found)


def _in_turn(kept: list[int], found: list[dict[str, Any]], groups: int, newest: int) -> Iterator[int]:
    """Archived steps as they are looked into: those of the ``newest`` groups, where these are wanted, as many evenly
    over the run as there is room for, and the others; of each the last one first. ``found`` is what is there yet."""
    left = list(kept)
    while left and len(found) < newest:
        yield left.pop()
    of_a_step = len(found) / (len(kept) - len(left)) if found else 0.0
    first = evenly(left, min(STEPS, int((groups - len(found)) / of_a_step)) if of_a_step else STEPS)
    yield from reversed(first)
    yield from sorted(set(left).difference(first), reverse=True)


def _seen(pictures: dict[str, str]) -> dict[str, Any]:
    return {"seen": pictures} if pictures else {}


def _in_order(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda group: (group["step"], group["group"]))


def _of_step(folder: Path, step: int) -> Iterator[tuple[Group, dict[str, np.ndarray]]]:
    """Groups of an archived step that can be read, with their columns."""
    try:
        read = archive.read_step(folder, step)
    except archive.ArchiveError as error:
        log.warning("a step is not on the page", step=step, error=str(error))
        return
    if read is not None:
        yield from readable(read[0])


def _shown(
    group: Group,
    columns: dict[str, np.ndarray],
    step: int,
    by_token: list[dict[str, np.ndarray]],
    texts: Texts | None,
) -> dict[str, Any]:
    """``columns`` have a value for each trajectory, ``by_token`` of each trajectory those with a value for each token.
    Without ``texts`` its tokens are left out: the page shows the responses."""
    flat = list(rows(step, group, columns))
    members = [_plain(row) for row in flat]
    read: dict[bytes, str] = {}
    """By its tokens, what a prompt says: most answers have the same."""
    for number, (member, trajectory) in enumerate(zip(members, group.trajectories, strict=True)):
        if (stem := _stem(group, number)) is not None:
            member["parent"], member["shared"] = stem
        if texts is not None:
            begin = _begin(trajectory) if stem is None else stem[1]
            member |= _tokens(trajectory, begin, step, by_token[number], texts)
            if stem is None:
                prompt = trajectory.tokens[: begin + 1]
                key = prompt.tobytes()
                if key not in read:
                    read[key] = texts.whole(prompt)
                member["asked"] = read[key]
        if trajectory.failure:
            member["failure"] = trajectory.failure
    asked = {member["asked"] for member in members if "asked" in member}
    if len(asked) == 1:  # else an environment, or agents, have begun otherwise each time
        for member in members:
            member.pop("asked", None)
    shown = _group(flat[0] | {"truth": _shortened(flat[0]["truth"])}, members)
    return shown | ({"asked": asked.pop()} if len(asked) == 1 else {})


def _begin(trajectory: Trajectory) -> int:
    """Where what is shown of it begins: with the prompt's last token."""
    first = int(np.flatnonzero(trajectory.loss_mask)[0]) if trajectory.sampled else len(trajectory.tokens)
    return max(0, first - 1)


def _stem(group: Group, number: int) -> tuple[int, int] | None:
    """Of a branch of an agent's session: the earlier one that it goes on from, and how many tokens they share."""
    own = group.trajectories[number]
    best: tuple[int, int] | None = None
    for earlier, other in enumerate(group.trajectories[:number]):
        if own.session == ALONE or other.session != own.session:
            continue
        if any(map(ne, own.pictures, other.pictures)):  # whose tokens may be the same all the same
            continue
        size = min(len(own.tokens), len(other.tokens))
        differ = np.flatnonzero(own.tokens[:size] != other.tokens[:size])
        shared = int(differ[0]) if differ.size else size
        if best is None or shared > best[1]:
            best = earlier, shared
    return best


def _tokens(
    trajectory: Trajectory, begin: int, step: int, columns: dict[str, np.ndarray], texts: Texts
) -> dict[str, Any]:
    places, counts = folded(trajectory.tokens[begin:], trajectory.loss_mask[begin:].astype(bool))
    places += begin
    learned = trajectory.loss_mask[places].astype(bool)
    sampled = learned & (not trajectory.given)
    found: dict[str, Any] = {
        "tokens": texts.of(trajectory.tokens[places], counts),
        "mask": learned.astype(int).tolist(),
        "logprob": _rounded(trajectory.logprobs[places], sampled),
        "lag": np.where(sampled, step - trajectory.versions[places], -1).tolist(),
    }
    if columns:
        found["by_token"] = {name: _rounded(values[places], learned) for name, values in columns.items()}
    return found


def _rounded(values: np.ndarray, sampled: np.ndarray) -> list[float | None]:
    shown = sampled & np.isfinite(values)
    return [round(float(value), 3) if on else None for value, on in zip(values, shown, strict=True)]


def _of_samples(folder: Path, groups: int, letters: int, archived: Set[int]) -> list[dict[str, Any]]:
    """The newest ``groups`` of steps that are not ``archived``, as far as so many ``letters`` go. The file may have
    gigabytes: it is never in memory as a whole, and its rows come in the order of the steps."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in each_line(folder / "samples.jsonl"):
        if row["step"] in archived:
            continue
        several = found.setdefault((row["step"], row["group"]), [])
        row["truth"] = _shortened(row["truth"]) if not several else None
        letters -= _letters([row]) + (0 if several else _letters_of_group(row))
        several.append(row)
        while len(found) > groups or (letters < 0 and len(found) > 1):
            oldest = found.pop(next(iter(found)))
            letters += _letters(oldest) + _letters_of_group(oldest[0])
    return [_group(several[0], [_plain(row) for row in several]) for several in found.values()]


def _letters(answers: Sequence[dict[str, Any]]) -> int:
    return sum(sum(len(answer.get(of, "")) for of in ("response", "failure", "asked")) + ABOUT for answer in answers)


def _letters_of_group(group: dict[str, Any]) -> int:
    return len(group["prompt"]) + len(group.get("asked", "")) + len(json.dumps(group["truth"]))


def _shortened(truth: Any) -> Any:
    """As text, cut short, where it is longer than a page has room for, such as the tests of a program."""
    text = truth if isinstance(truth, str) else json.dumps(truth)
    return truth if len(text) <= TRUTH else f"{text[:TRUTH]} … (cut: {len(text):,} characters)"


SHARED = ("step", "group", "prompt", "truth")


def _group(row: dict[str, Any], members: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: row[name] for name in SHARED} | {"members": members}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in row.items()
        if name not in SHARED and name != "tokens"
    } | {"sampled": row["tokens"]}
