"""Tasks of several turns over the real engine and real environments: what is sampled, what is not, and when it ends."""

from __future__ import annotations

import itertools
import queue
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.pipeline.models.characters import ALPHABET
from penstock.pipeline.models.tiny import make_tokenizer
from penstock.protocols.experience import UNSAMPLED, Group, Prompt, Sampling, Trajectory
from penstock.protocols.messages import Lease
from penstock.protocols.packed_groups import pack_group, unpack_group
from penstock.services.broker.config import EvalSampling
from penstock.services.environments.config import EnvironmentConfig
from penstock.services.modeling import attention  # noqa: F401 - registers ours
from penstock.services.rollout.by_source import FIRST_NUMBER, BySource, posting
from penstock.services.rollout.config import RolloutConfig, SamplingConfig, TorchEngineConfig
from penstock.services.rollout.engines.base import Completion, Request, RequestError
from penstock.services.rollout.group_maker import Made
from penstock.services.rollout.multi_turn import MultiTurn
from penstock.services.rollout.service import Rollout
from penstock.services.rollout.single_turn import SingleTurn
from penstock.services.runtime.actor import ActorContext
from penstock.services.turns.tokenizer import Tokenizer
from penstock.services.turns.tool_calls import Call
from penstock.services.weights.config import WeightsConfig
from tests.environments import mcp_toy
from tests.rollout.test_torch_engine import engine_for, make

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

CALLED = (  # as Mistral's and gpt-oss's want to know of results whose they are
    "{% set last = namespace(calls=[]) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set last.calls = m.tool_calls or [] %}{% elif m.role == 'tool' and not last.calls | map(attribute='id') "
    "| select('equalto', m.tool_call_id) | list %}{{ raise_exception('whose result?') }}{% endif %}{% endfor %}"
)
CALLS = "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of one character a token, with 51 of them, as the model has."""
    found = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(set(ALPHABET[:48])).save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    return make("qwen3")


class Table:
    """A `MultiTurn`, played until its groups are made."""

    def __init__(self, folder: Path, model: Any, max_length: int | None = 64, **environment: Any) -> None:
        self.engine, self.text = engine_for(model, {1}), Tokenizer(str(folder))
        self.inbox: queue.Queue[object] = queue.Queue()
        config = EnvironmentConfig.model_validate(environment)
        self.maker = MultiTurn(self.engine, self.text, config, max_length, self.inbox.put)

    def play(self, *leases: Lease) -> list[Group | str]:
        for lease in leases:
            self.maker.start(lease)
        found: dict[int, Group | str] = {}
        deadline = time.monotonic() + 60

        def keep(made: Made | None) -> None:
            if made:
                found[made[0].number] = made[1]

        while len(found) < len(leases):
            assert time.monotonic() < deadline
            for result in self.engine.step():
                keep(self.maker.take(result))
            try:
                keep(self.maker.heard(self.inbox.get(timeout=0 if self.engine.pending() else 0.1)))
            except queue.Empty:
                pass
        assert not any(self.maker.has(lease) for lease in leases)
        return [found[lease.number] for lease in leases]


@pytest.fixture
def table(folder: Path, model: Any) -> Iterator[Any]:
    made: list[Table] = []

    def opened(**options: Any) -> Table:
        made.append(Table(folder, model, **options))
        return made[-1]

    yield opened
    for each in made:
        each.maker.close()


class Mixed(Table):
    """Prompts of two sources are played, each in an environment of its own, all others answered once."""

    def __init__(self, folder: Path, model: Any) -> None:
        super().__init__(folder, model, **COUNTING)
        self.maker.close()
        numbers, makers = itertools.count(FIRST_NUMBER), {}
        counting = COUNTING | {"options": {"turns": 3}}
        for source, told in {"count": counting, "twice": counting | {"max_turns": 2}}.items():
            config, post = EnvironmentConfig.model_validate(told), posting(source, self.inbox.put)
            makers[source] = MultiTurn(self.engine, self.text, config, 64, post, numbers=numbers)
        self.maker = BySource({**makers, "": SingleTurn(self.engine, self.text)})  # type: ignore[assignment]


def lease(number: int = 0, truth: str = "ab", n: int = 3, new: int = 4, **more: Any) -> Lease:
    sampling = Sampling(n=n, max_new_tokens=new, **more)
    prompt = Prompt(index=number, text="sort ba=", truth=truth)
    return Lease(purpose="train", number=number, attempt=1, seed=5, prompt=prompt, sampling=sampling)


COUNTING: dict[str, Any] = {"environment": "tests.environments.games:Counting"}


def group(found: Group | str) -> Group:
    assert isinstance(found, Group), found
    return unpack_group(pack_group(found))


def test_each_source_is_played_in_its_own_environment_at_once(folder: Path, model: Any) -> None:
    at = Mixed(folder, model)
    sources = ["count", "", "twice", "count", "other", "twice"]
    leases = [lease(number) for number in range(len(sources))]
    leases = [
        each.model_copy(update={"prompt": each.prompt.model_copy(update={"source": source})})
        for each, source in zip(leases, sources, strict=True)
    ]
    try:
        found = [group(each) for each in at.play(*leases)]
        assert at.maker.gauges()["environment_failed"] == 0
    finally:
        at.maker.close()
    turns = {"count": 3, "twice": 2, "": 0, "other": 0}
    for each, source in zip(found, sources, strict=True):
        assert [len(t.turns) for t in each.trajectories] == [turns[source]] * 3
        assert all(bool(t.rewards.size) == bool(turns[source]) for t in each.trajectories)


def test_only_what_the_policy_said_is_sampled_and_rewards_lie_where_turns_end(table: Any) -> None:
    at = table(**COUNTING, options={"turns": 3})
    for trajectory in group(at.play(lease())[0]).trajectories:
        text = at.text
        sampled = trajectory.loss_mask == 1
        edges = np.flatnonzero(np.diff(np.concatenate([[0], trajectory.loss_mask, [0]])))
        spans = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        assert len(spans) == len(trajectory.turns) == 3
        said = text.decode([trajectory.tokens[a:b].tolist() for a, b in spans])
        assert tuple(said) == trajectory.turns
        gaps = [trajectory.tokens[a:b].tolist() for a, b in zip([0, *edges[1:-1:2]], edges[::2], strict=True)]
        assert text.decode(gaps) == ["begin ab=", "turn 1=", "turn 2="]
        ends = {end - 1: 0.5 * turn for turn, (_, end) in enumerate(spans, 1)}
        assert {i: float(r) for i, r in enumerate(trajectory.rewards) if r} == ends
        assert trajectory.metrics == {"said": 3.0, "turn_1": 0.5, "turn_2": 0.5, "turn_3": 0.5}
        assert np.all(trajectory.versions[~sampled] == UNSAMPLED) and np.all(trajectory.logprobs[~sampled] == 0)
        wanted = at.engine.score(at.engine._model.weights, trajectory.tokens)
        np.testing.assert_allclose(trajectory.logprobs[1:][sampled[1:]], wanted[sampled[1:]], atol=2e-4)


def test_what_a_prompt_has_the_template_told_is_told_at_every_turn(table: Any) -> None:
    at = table(**COUNTING, options={"turns": 3})
    at.text.plain.chat_template = CHAT.replace("<assistant>", "{{ level }}=")
    asked = lease()
    own = Prompt(index=0, messages=[{"role": "user", "content": "ab"}], chat_template_kwargs={"level": "b"})
    asked = asked.model_copy(update={"prompt": own})
    for trajectory in group(at.play(asked)[0]).trajectories:
        said = at.text.decode([trajectory.tokens[trajectory.loss_mask == 0].tolist()])[0]
        assert said.count("b=") == 3, said


def test_what_turns_measure_must_add_up(table: Any) -> None:
    at = table(environment="tests.environments.games:Measuring")
    for trajectory in group(at.play(lease())[0]).trajectories:
        assert trajectory.failure == "metrics of the session: size: inf is no finite number"
        assert trajectory.metrics == {} and len(trajectory.turns) == 2


def test_the_same_lease_gives_the_same_trajectories_whatever_else_is_played(table: Any) -> None:
    alone = group(table(**COUNTING).play(lease(7))[0])
    beside = group(table(**COUNTING).play(lease(6, "ba"), lease(7), lease(8, "cc"))[1])
    for one, other in zip(alone.trajectories, beside.trajectories, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    assert len({tuple(t.tokens.tolist()) for t in alone.trajectories}) > 1


def test_it_ends_where_turns_or_room_do(table: Any) -> None:
    cut = group(table(**COUNTING, options={"turns": 9}, max_turns=2).play(lease())[0])
    assert {(t.finish, len(t.turns)) for t in cut.trajectories} == {("length", 2)}
    full = group(table(**COUNTING, options={"turns": 9}, max_turns=9, max_length=30).play(lease(new=8))[0])
    for trajectory in full.trajectories:
        assert trajectory.finish == "length" and 1 <= len(trajectory.turns) < 9 and len(trajectory.tokens) <= 30
        assert trajectory.loss_mask[-1] == 1, "an observation that nobody answers is left out"


def test_a_step_that_asks_is_told_whether_the_answer_was_cut_off(table: Any) -> None:
    at, seen = table(**COUNTING | {"environment": "tests.environments.games:Told"}), set()
    for trajectory in group(at.play(lease(n=16, new=6))[0]).trajectories:
        ends = np.flatnonzero(np.diff(np.concatenate([trajectory.loss_mask, [0]])) == -1)
        cut = [float(trajectory.tokens[end] not in at.text.stop_ids) for end in ends]
        assert trajectory.rewards[ends].tolist() == cut
        seen.update(cut)
    assert seen == {0.0, 1.0}


def test_a_greedy_baseline_is_one_more_and_says_so(table: Any) -> None:
    found = group(table(**COUNTING).play(lease(greedy_baseline=True))[0]).trajectories
    assert [t.greedy for t in found] == [False] * 3 + [True]
    again = group(table(**COUNTING).play(lease(9, greedy_baseline=True))[0]).trajectories
    assert found[3].tokens.tolist() == again[3].tokens.tolist(), "it is drawn by nothing"


@pytest.mark.parametrize(
    ("deed", "why"), [("raise", "step raised RuntimeError: no idea"), ("crash", "step crashed with exit code 3")]
)
def test_what_goes_wrong_costs_its_own_trajectory(
    table: Any, deed: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = table(environment="tests.environments.games:Misbehaving", timeout_s=1.0, max_turns=3)
    decode, submit, drawn = at.text.decode, at.engine.submit, list[Request]()
    spoken = iter(["x", "x", "x", "x", deed, *["x"] * 99])
    monkeypatch.setattr(at.engine, "submit", lambda request: (drawn.append(request), submit(request)))

    def spoil(rows: list[list[int]]) -> list[str]:
        return [next(spoken)] if len(rows) == 1 and len(rows[0]) <= 4 else decode(rows)

    at.text.decode = spoil
    found = group(at.play(lease())[0]).trajectories
    failed = [t for t in found if t.failure]
    assert len(failed) == 1 and why in failed[0].failure
    assert all(float(t.rewards.sum()) == 3.0 for t in found if not t.failure)
    assert len(drawn) == sum(len(t.turns) for t in found), "no turn is drawn twice"


def test_a_prompt_without_room_is_nobodys_turn(table: Any) -> None:
    found = group(table(**COUNTING, max_length=5).play(lease())[0]).trajectories
    assert all("no room" in t.failure and not t.sampled and not t.turns for t in found)


def test_what_is_far_too_long_is_not_counted(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at = table(environment="tests.environments.games:Long", max_turns=3)
    counted: list[int] = []
    plain = at.text._tokenizer

    def count(text: str, **more: Any) -> Any:
        counted.append(len(text))
        return plain(text, **more)

    monkeypatch.setattr(at.text, "_tokenizer", Spied(plain, count))
    said, begun = (group(found).trajectories for found in at.play(lease(0), lease(1, "long")))
    assert all(not t.failure and len(t.turns) == 1 and t.finish == "length" for t in said)
    assert all(float(t.rewards.sum()) == 0.5 and t.loss_mask[-1] == 1 for t in said)
    assert all("too many for the 64 tokens" in t.failure for t in begun)
    assert counted and max(counted) < 1000


class Spied:
    """A tokenizer whose calls are seen."""

    def __init__(self, plain: Any, call: Any) -> None:
        self._plain, self._call = plain, call

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._call(*args, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def test_a_trajectory_is_no_longer_than_the_model_has_positions_for(folder: Path, model: Any, tmp_path: Path) -> None:
    model.config.save_pretrained(tmp_path)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    engine = TorchEngineConfig(max_sequences=4, max_length=512, device="cpu")
    config = RolloutConfig(engine=engine, environment=EnvironmentConfig.model_validate(COUNTING))
    context = ActorContext("rollout-0", "run", tmp_path, "tcp://127.0.0.1:1")
    made = Rollout(context, config, WeightsConfig(), str(tmp_path), "float32", 3)
    assert isinstance(made._maker, MultiTurn) and made._maker._max_length == made.engine._length == 128
    made._receiver.close()
    made._maker.close()
    made.actor.mailbox.close(0)


def test_answers_without_a_bound_are_as_long_as_their_prompts_leave_room(folder: Path, model: Any) -> None:
    engine, text = engine_for(model, set()), Tokenizer(str(folder))
    sampling = SamplingConfig(n=2, max_new_tokens=None)
    for own in (sampling.training(True), EvalSampling().of(sampling.greedy())):
        maker = SingleTurn(engine, text, max_length=24)
        short = lease(1).model_copy(update={"sampling": own})
        long = lease(2).model_copy(update={"sampling": own, "prompt": Prompt(index=2, text="sort abcdefgh=")})
        made = dict[int, Any]()
        for each in (short, long):
            maker.start(each)
        while len(made) < 2:
            for result in engine.step():
                if found := maker.take(result):
                    made[found[0].number] = found[1]
        for group in made.values():
            assert {(len(t.tokens), t.finish) for t in group.trajectories} == {(24, "length")}
    with pytest.raises(RequestError, match="a prompt of 24 tokens leaves no room for an answer in the 24 that"):
        maker.start(short.model_copy(update={"prompt": Prompt(index=3, text="a" * 24)}))


def test_single_answers_have_a_greedy_one_more(folder: Path, model: Any) -> None:
    engine = engine_for(model, {1})
    maker = SingleTurn(engine, Tokenizer(str(folder)))
    maker.start(lease(greedy_baseline=True))
    made = None
    while made is None:
        for result in engine.step():
            made = made or maker.take(result)
    assert isinstance(made[1], Group) and [t.greedy for t in made[1].trajectories] == [False] * 3 + [True]
    plain = SingleTurn(engine, Tokenizer(str(folder)))
    plain.start(lease())
    other = None
    while other is None:
        for result in engine.step():
            other = other or plain.take(result)
    assert isinstance(other[1], Group)
    mine = [t.tokens.tolist() for t in made[1].trajectories[:3]]
    assert mine == [t.tokens.tolist() for t in other[1].trajectories], "the others are as they would be without it"


def test_a_chat_goes_on_as_its_template_says_without_a_token_made_twice(folder: Path) -> None:
    text = Tokenizer(str(folder))
    text._tokenizer.chat_template = CHAT
    text._tokenizer.add_tokens(["<eos>"], special_tokens=True)
    between = text._tokenizer.decode
    ended = text._tokenizer.eos_token_id
    assert between([ended]) == "<eos>"
    closed = text._tokenizer.decode(text.observe("go on", True, ended))
    cut_off = text._tokenizer.decode(text.observe("go on", True, text._tokenizer.convert_tokens_to_ids("a")))
    assert cut_off == "<eos>" + closed, "an answer that was cut off is ended as the template does"
    assert closed.replace("<unk>", "").endswith("assistant") and "go on<eos>" in closed
    assert text._tokenizer.decode(text.observe("go on", False, ended)) == "go on"


class Scripted:
    """An engine that says what it is told to, a turn after the other."""

    def __init__(self, text: Tokenizer, *turns: str) -> None:
        self._text, self._turns, self._asked = text, turns, list[Request]()
        self.read: list[str] = []

    def submit(self, request: Request) -> None:
        self.read.append(self._text.decode([request.tokens.tolist()])[0])
        self._asked.append(request)

    def step(self) -> list[Completion]:
        asked, self._asked = self._asked, []
        return [self._said(request, self._turns[len(self.read) - 1]) for request in asked]

    def pending(self) -> int:
        return len(self._asked)

    def _said(self, request: Request, turn: str) -> Completion:
        tokens = np.array(self._text._tokenize(turn), np.int32)
        return Completion(request.number, 0, tokens, np.zeros(len(tokens), np.float32), np.zeros_like(tokens), "stop")


def test_tools_of_a_server_and_python_are_told_of_called_and_read(tmp_path: Path, model: Any) -> None:
    pytest.importorskip("mcp")
    make_tokenizer({*map(chr, range(32, 127)), "\n"}).save_pretrained(tmp_path)
    server = mcp_toy.Sessions()
    options = {"functions": ["python"], "mcp": [{"url": server.url}], "longest": 9}
    table = Table(tmp_path, model, None, environment="tools", options=options)
    table.text._tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
        + CALLED
        + CHAT.replace("<eos>", CALLS + "<eos>").replace("<assistant>", "<assistant><think>")
    )
    python = 'a <tool_call> now.</think><tool_call>{"name": "python", "arguments": {"code": "6 * 7"}}</tool_call>'
    maybe = 'or <tool_call>{"name": "look"}</tool_call>'  # cut off in its thoughts
    table.engine = table.maker._engine = engine = Scripted(  # type: ignore[assignment]
        table.text, python + '<tool_call>{"name": "look"}</tool_call>', maybe
    )
    asks = Prompt(index=0, messages=[{"role": "user", "content": "what is it?"}])
    try:
        (found,) = table.play(lease(n=1, new=200).model_copy(update={"prompt": asks}))
    finally:
        table.maker.close()
        server.shutdown(), server.server_close()
    first, second = engine.read
    assert first.startswith("python look <user>what is it?") and second.startswith(first + python)
    assert second.endswith("<tool>42\n\n<tool>session-0\n<assistant><think>")
    (told,) = group(found).trajectories
    assert not told.failure
    assert told.turns == (python + '<tool_call>{"name": "look"}</tool_call>', maybe)


def counted(table: Table, target: int, new: int) -> Trajectory:
    """The one trajectory of a task of `games.Adding`."""
    row = {"prompt": "count", "target": target}
    task = Prompt(index=0, messages=[{"role": "user", "content": "count"}], truth=row)
    try:
        (found,) = table.play(lease(n=1, new=new).model_copy(update={"prompt": task}))
    finally:
        table.maker.close()
    (told,) = group(found).trajectories
    return told


def shouted(said: str) -> tuple[str, list[Call]]:
    """``LOOK!NAME``: a parser of the user's own."""
    words, _, name = said.partition("LOOK!")
    return words, [Call(name, {"step": 3})] if name else []


THINKS = "<|channel|>analysis<|message|>hm to=functions.add<|message|>no<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("form", "asks", "answer"),
    [
        (
            "harmony",
            THINKS + '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"step": 3}<|call|>',
            "<|channel|>final<|message|>to=functions.add<|return|>",
        ),
        ("tests.rollout.test_multi_turn:shouted", "I LOOK!add", "<tool_call>well</tool_call> no"),
        ("tests.rollout.test_multi_turn:shouted", 'x <tool_call>{"name": "y"}LOOK!add', "6"),
        pytest.param(
            "vllm:hermes",
            '<tool_call>{"name": "add", "arguments": {"step": 3}}</tool_call>',
            "6",
            marks=pytest.mark.vllm,
        ),
    ],
)
def test_calls_that_only_a_tokenizer_or_a_function_tells_apart_are_run(
    form: str, asks: str, answer: str, tmp_path: Path, model: Any
) -> None:
    tokenizer = make_tokenizer({*map(chr, range(32, 127)), "\n"})
    tokenizer.add_special_tokens({"additional_special_tokens": [*re.findall(r"<\|\w+\|>", THINKS + asks + answer)]})
    tokenizer.save_pretrained(tmp_path)
    options = {"class": "tests.environments.games:Adding", "tool_calls": form}
    table = Table(tmp_path, model, 500, environment="tools", options=options, max_turns=3)
    table.text._tokenizer.chat_template = CHAT.replace("<eos>", CALLS + "<eos>")
    table.engine = table.maker._engine = engine = Scripted(table.text, asks, answer)  # type: ignore[assignment]
    told = counted(table, 3, 200)
    assert not told.failure and len(told.turns) == 2 and told.rewards.sum() == 1.0
    assert "<tool>" in engine.read[1] and np.count_nonzero(told.loss_mask) == len(table.text._tokenize(asks + answer))


@pytest.mark.parametrize(("turns", "room"), [(2, 400), (9, 160)])
def test_an_objects_reward_is_the_last_turns_also_where_no_turn_or_room_is_left(
    tmp_path: Path, model: Any, turns: int, room: int
) -> None:
    make_tokenizer({*map(chr, range(32, 127)), "\n"}).save_pretrained(tmp_path)
    options = {"class": "tests.environments.games:Adding"}
    table = Table(tmp_path, model, room, environment="tools", options=options, max_turns=turns)
    table.text._tokenizer.chat_template = CHAT
    call = '<tool_call>{"name": "add", "arguments": {"step": 3}}</tool_call>'
    table.engine = table.maker._engine = Scripted(table.text, *[call] * 9)  # type: ignore[assignment]
    told = counted(table, 6, 70)
    assert told.turns == (call, call) and told.finish == "length" and not told.failure
    (place,) = np.flatnonzero(told.rewards)
    assert told.rewards[place] == 1.0 and place == np.flatnonzero(told.loss_mask)[-1]
