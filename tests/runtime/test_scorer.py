"""The loop of all scorers: what is scored is said before the next groups are, and a stop is heard meanwhile."""

from __future__ import annotations

import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.pipeline.harness.answering import AnsweringBroker
from penstock.pipeline.run.crashes import is_own
from penstock.protocols import messages as m
from penstock.protocols.columns import REFERENCE
from penstock.protocols.experience import Group, summarize
from penstock.protocols.packed_groups import pack_group
from penstock.services.modeling.load import ModelError
from penstock.services.reference.config import ReferenceConfig
from penstock.services.reference.service import Reference
from penstock.services.reward.config import RewardConfig
from penstock.services.reward.service import Reward
from penstock.services.runtime import checkpoint_folders, custom_scorer
from penstock.services.runtime.actor import ActorContext
from penstock.services.runtime.custom_scorer import BrokenScorerError, CustomScorer, ScorerConfig
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.scorer import Scorer, ScorerActor, ScoringTask
from penstock.services.user_processes.pool import WorkerPool
from penstock.services.user_processes.worker import ProgramError
from tests.conftest import TINY, make_group

HEARD: set[int] = set()
"""Groups whose scores have come to the broker."""


class Attentive:
    """Takes a while for a group, and refuses it where the one before has not been answered by then."""

    def score_group(self, group: Group, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        deadline = time.monotonic() + 10
        while group.number and group.number - 1 not in HEARD:
            assert time.monotonic() < deadline, "the group before is not answered"
            time.sleep(0.01)
        time.sleep(0.1)
        return {"x": np.full(len(group.trajectories), group.number, np.float32)}


class Quick:
    """At once."""

    def score_group(self, group: Group, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"x": np.zeros(len(group.trajectories), np.float32)}


class Odd:
    """Quotes what is no text, as half of a pair out of JSON is none."""

    def score_group(self, group: Group, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise ValueError("no label in \ud83d")


class Sleepy:
    """Hears nothing for a while."""

    def score_group(self, group: Group, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(0.8)
        return {name: np.zeros(len(group.trajectories), np.float32) for name in ("x", "y")}


class Broker(AnsweringBroker):
    """Gives a scorer ``groups`` as soon as it has credit, all in one message, and a stop after ``last`` answers."""

    def __init__(self, groups: list[Group], column: str, last: int) -> None:
        self.scores: list[m.Scores] = []
        self._items = [_work_item(group, column) for group in groups]
        self._last = last
        HEARD.clear()
        super().__init__()

    def answer(self, identity: str, message: m.Message) -> m.Message | None:
        if isinstance(message, m.Hello):
            return m.Welcome(run="r", heartbeat_s=1.0)
        if isinstance(message, m.Credit) and self._items:
            self.router.send(identity, m.Work(items=self._items))
            self._items = []
        elif isinstance(message, m.Scores):
            self.scores.append(message)
            HEARD.update(score.number for score in message.scores)
            if len(HEARD) >= self._last:
                self.router.send(identity, m.Stop(reason="enough"))
            return m.Ack()
        return None


class GivesTheNext(Broker):
    """Gives the first group again, for the column ``y``, right behind its answer to ``x``."""

    def __init__(self, groups: list[Group]) -> None:
        self.held: list[m.Holding] = []
        """As the scorer's beats say."""
        self._next = [m.Work(items=[_work_item(groups[0], "y")])]
        super().__init__(groups, "x", last=len(groups) + 1)

    def answer(self, identity: str, message: m.Message) -> m.Message | None:
        if isinstance(message, m.Heartbeat):
            self.held.append(message.holding)
            return m.HeartbeatAck()
        if isinstance(message, m.Hello):
            self._scorer = identity
            return m.Welcome(run="r", heartbeat_s=0.1)
        if isinstance(message, m.Scores) and message.column == "y":
            self.router.send(identity, m.Stop(reason="enough"))
        return super().answer(identity, message)

    def turn(self) -> None:
        if self.scores and self._next:
            self.router.send(self._scorer, self._next.pop())


def _work_item(group: Group, column: str) -> m.WorkItem:
    said = summarize(group)
    return m.WorkItem(
        purpose="train", number=group.number, experience=np.frombuffer(pack_group(group), np.uint8),
        trajectories=said.trajectories, tokens=said.tokens, oldest=said.oldest, wanted=[column],
    )  # fmt: skip


def _groups(count: int) -> list[Group]:
    random = np.random.default_rng(0)
    return [make_group(random, number) for number in range(count)]


def _scorer(broker: Broker, scorer: Scorer, folder: Path) -> ScorerActor:
    return ScorerActor("scorer", ActorContext("scorer-0", "r", folder, broker.address), scorer)


def _custom(name: str) -> CustomScorer:
    return CustomScorer(ScorerConfig(scorer=f"{__name__}:{name}", columns={"x": "trajectory"}), "x")


def test_a_group_is_answered_before_the_next_one_is_begun_and_a_stop_is_heard(tmp_path: Path) -> None:
    with Broker(_groups(40), "x", last=4) as broker:
        assert _scorer(broker, _custom("Attentive"), tmp_path).run() == "enough"
        said = [score for message in broker.scores for score in message.scores]
    assert [score.number for score in said] == list(range(len(said))) and 4 <= len(said) < 10
    assert all(not score.unusable and (score.values == score.number).all() for score in said)


def test_what_takes_no_time_is_said_together(tmp_path: Path) -> None:
    with Broker(_groups(40), "x", last=40) as broker:
        _scorer(broker, _custom("Quick"), tmp_path).run()
        assert len(broker.scores) < 20 and sum(len(message.scores) for message in broker.scores) == 40


def test_an_error_that_quotes_what_is_no_text_costs_its_group_alone(tmp_path: Path) -> None:
    with Broker(_groups(2), "x", last=2) as broker:
        assert _scorer(broker, _custom("Odd"), tmp_path).run() == "enough"
        said = [score.unusable for message in broker.scores for score in message.scores]
    assert len(said) == 2 and all(r"ValueError: no label in \ud83d" in each for each in said)


def test_a_group_that_comes_again_with_the_answer_to_its_first_column_is_held_all_the_while(tmp_path: Path) -> None:
    config = ScorerConfig(scorer=f"{__name__}:Sleepy", columns={"x": "trajectory", "y": "trajectory"})
    with GivesTheNext(_groups(2)) as broker:
        assert _scorer(broker, CustomScorer(config, "sleepy"), tmp_path).run() == "enough"
        assert [message.column for message in broker.scores] == ["x", "x", "y"]
        held = [0 in each.get("train", []) for each in broker.held]
        assert len(held) > 5 and all(held[held.index(True) :]), "from when it was given first"


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_function_that_cannot_be_called_any_more_ends_its_process(
    whole_group: bool, tmp_path: Path, user_module: Callable[[str, str], Path]
) -> None:
    file = user_module("edited_in_a_run.py", "import os\n\n\ndef f(response): os._exit(3)\n")
    config = RewardConfig.model_validate({"functions": [{"function": "edited_in_a_run:f", "whole_group": whole_group}]})
    reward = Reward(config, workers=1, group_size=4)
    column, program = config.functions[0].column, config.functions[0].program("reward.functions.0")
    reward._pools[column].close()
    reward._pools[column] = WorkerPool(program, 1, 8)
    reward._pools[column]._queues[0]._start_s = 2.0  # of those that come after
    file.write_text("def f(response:\n")
    said = r"reward.functions.0.function: .*edited_in_a_run.*was it edited\? then mend it"
    with Broker(_groups(4), column, last=4) as broker, pytest.raises(ProgramError, match=said):
        _scorer(broker, reward, tmp_path).run()
    assert {score.number for message in broker.scores for score in message.scores} <= {0}, "the others lose nothing"


def test_a_reference_that_is_refreshed_is_on_its_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's meta device stands for a GPU."""
    model = Qwen3ForCausalLM(Qwen3Config(**TINY))
    for folder in ("start", "step-000002", "step-000004"):
        model.save_pretrained(tmp_path / folder)
    config = ReferenceConfig(device="meta", refresh_every=2)
    reference = Reference(config, str(tmp_path / "start"), "float32", 1.0, False, tmp_path)
    first, moved, to = weakref.ref(reference._frozen.model), [], Qwen3ForCausalLM.to

    def move(newer: Qwen3ForCausalLM, device: torch.device) -> Qwen3ForCausalLM:
        moved.append((device.type, first() is None))
        return to(newer, device)

    monkeypatch.setattr(Qwen3ForCausalLM, "to", move)
    reference._refresh(2)
    assert moved == [("cpu", False), ("meta", True)]
    assert reference.gauges() == {"reference_version": 2.0} and reference._frozen.model.device.type == "meta"
    serves = reference._frozen.model
    (tmp_path / "step-000004" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"reference\.refresh_every: cannot load the model in .*step-000004"):
        reference._refresh(4)
    assert reference._frozen.model is serves and reference.gauges() == {"reference_version": 2.0}


def test_a_reference_that_is_mixed_is_the_same_whoever_makes_it(tmp_path: Path) -> None:
    """Of every version that is due, in turn: also where a process begins anew, or looks for the first time in a
    while, and where checkpoints of those that are mixed are gone."""
    torch.manual_seed(0)
    checkpoints, models = tmp_path / "checkpoints", {}
    for version in (0, 2, 4, 6):
        models[version] = Qwen3ForCausalLM(Qwen3Config(**TINY))
        models[version].save_pretrained(checkpoint_folders.path_of(checkpoints, version) if version else tmp_path / "0")
    config = ReferenceConfig(device="cpu", refresh_every=2, mix=0.25)

    def begin(run: Path = tmp_path) -> Reference:
        return Reference(config, str(tmp_path / "0"), "float32", 1.0, False, run / "checkpoints")

    def weight(model: Any) -> torch.Tensor:
        found: torch.Tensor = model.get_parameter("model.layers.1.mlp.up_proj.weight").detach()
        return found

    wanted = {0: weight(models[0])}
    for version in (2, 4, 6):
        wanted[version] = wanted[version - 2].lerp(weight(models[version]), 0.25)
    shutil.copytree(checkpoints, tmp_path / "late" / "checkpoints")
    (late := begin(tmp_path / "late"))._refresh(6)
    assert torch.equal(weight(late._frozen.model), wanted[6])
    one, behind = begin(), begin()
    for step, version in ((1, 0), (3, 2), (4, 4)):
        one._refresh(step)
        assert torch.equal(weight(one._frozen.model), wanted[version]) and one.gauges()["reference_version"] == version
    assert not torch.equal(wanted[4], wanted[2]) and not torch.equal(wanted[4], weight(models[4]))
    shutil.rmtree(checkpoints / "step-000002")
    shutil.rmtree(checkpoints / "step-000004")
    again = begin()
    again._refresh(5)
    assert torch.equal(weight(again._frozen.model), wanted[4])
    again._refresh(6)
    assert torch.equal(weight(again._frozen.model), wanted[6])
    assert checkpoint_folders.versions(tmp_path / "reference") == [4, 6]
    behind._refresh(2)
    assert torch.equal(weight(behind._frozen.model), wanted[4]), "the others have left 2 behind"


@pytest.mark.parametrize("alone", [False, True])
def test_the_reference_begins_what_fills_a_forward_pass(alone: bool, tmp_path: Path) -> None:
    Qwen3ForCausalLM(Qwen3Config(**TINY)).save_pretrained(tmp_path)

    def make(tokens: int) -> Reference:
        config = ReferenceConfig(device="cpu", tokens_per_batch=tokens)
        return Reference(config, str(tmp_path), "float32", 1.0, alone, tmp_path)

    left: Sequence[ScoringTask] = [ScoringTask(("train", g.number), g, (REFERENCE,), {}, 0) for g in _groups(24)]
    expected = {}
    for task in left:
        make(8192).score([task], lambda task, column, values: expected.update({task.key: values}))
    reference, found, turns = make(100), {}, []
    while left:
        before = len(left)
        left = reference.score(left, lambda task, column, values: found.update({task.key: values}))
        turns.append(before - len(left))
    assert turns == [1] * 24 if alone else min(turns[:-1]) > 1 and max(turns) < 12
    assert list(found) == list(expected)
    assert all(np.allclose(found[key], expected[key], atol=1e-5) for key in found)


def test_a_group_with_ids_that_the_reference_does_not_know_costs_itself_alone(tmp_path: Path) -> None:
    Qwen3ForCausalLM(Qwen3Config(**TINY)).save_pretrained(tmp_path)
    reference = Reference(ReferenceConfig(device="cpu"), str(tmp_path), "float32", 1.0, False, tmp_path)
    groups = _groups(3)
    strange = groups[1].trajectories[0]
    strange.tokens[-1] = reference._frozen.model.config.vocab_size
    said: dict[int, str] = {}

    def answer(task: ScoringTask, column: str, values: np.ndarray | None = None, unusable: str = "") -> None:
        said[task.group.number] = unusable

    tasks = [ScoringTask(("train", g.number), g, (REFERENCE,), {}, 0) for g in groups]
    assert not reference.score(tasks, answer)
    assert said.keys() == {0, 1, 2} and not said[0] and not said[2]
    assert "is beyond the model's vocabulary" in said[1]
    assert not reference.score(tasks[1:2], answer), "also where there is no other"


class Broken:
    """From a group on it can do nothing, as where its device is gone."""

    def score_group(self, group: Group, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if group.number >= 3:
            raise RuntimeError(f"device lost at {group.number}")
        return {"x": np.zeros(len(group.trajectories), np.float32)}


def test_a_scorer_that_fails_on_one_group_after_the_other_ends_its_process(tmp_path: Path) -> None:
    with Broker(_groups(40), "x", last=40) as broker:
        with pytest.raises(BrokenScorerError, match="8 groups in a row cannot be scored, .*device lost at 10"):
            _scorer(broker, _custom("Broken"), tmp_path).run()
        said = [score for message in broker.scores for score in message.scores]
    assert sum(bool(score.unusable) for score in said) < 8
    assert not is_own(BrokenScorerError("twice is not the end: whom it asks may be away"))


class Wrong:
    def score_group(self, group: Group, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"x": np.zeros(1, np.float32)}


def test_what_a_scorer_returns_wrong_ends_the_run_and_not_one_process_after_the_other(tmp_path: Path) -> None:
    with (
        Broker(_groups(40), "x", last=40) as broker,
        pytest.raises(SetupError, match="8 groups in a row cannot be scored, .*ColumnError: column x: expected"),
    ):
        _scorer(broker, _custom("Wrong"), tmp_path).run()


class AtOnce:
    """Three at once; of one it can say nothing."""

    turns: ClassVar[list[list[int]]] = []

    def at_once(self, groups: Sequence[Group]) -> int:
        return 3

    def score_groups(
        self, groups: Sequence[Group], columns: Sequence[dict[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray]]:
        assert len(groups) == len(columns)
        self.turns.append([group.number for group in groups])
        return [self._say(group) for group in groups]

    def score_group(self, group: Group, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.turns.append([group.number])
        return self._say(group)

    def _say(self, group: Group) -> dict[str, np.ndarray]:
        if group.number == 4:
            raise ValueError("of four there is nothing to say")
        return {"x": np.full(len(group.trajectories), group.number, np.float32)}


@pytest.mark.parametrize("alone", [False, True])
def test_a_class_that_takes_several_groups_is_given_them_and_a_bad_one_costs_itself(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AtOnce, "turns", [])
    monkeypatch.setattr(custom_scorer, "AT_ONCE_S", -1.0)
    config = ScorerConfig(scorer=f"{__name__}:AtOnce", columns={"x": "trajectory"})
    scorer, found, refused = CustomScorer(config, "mine", alone=alone), {}, []

    def answer(task: ScoringTask, column: str, values: np.ndarray | None = None, unusable: str = "") -> None:
        if unusable:
            refused.append((task.group.number, unusable))
        else:
            found[task.group.number] = values

    left: Sequence[ScoringTask] = [ScoringTask(("train", g.number), g, ("x",), {}, 0) for g in _groups(8)]
    while left:
        left = scorer.score(left, answer)
    singly = [[number] for number in range(8)]
    assert AtOnce.turns == (singly if alone else [[0, 1, 2], [3, 4, 5], [3], [4], [5], [6, 7]])
    ((number, why),) = refused
    assert number == 4 and "of four there is nothing to say" in why
    assert sorted(found) == [0, 1, 2, 3, 5, 6, 7] and all((values == n).all() for n, values in found.items())
