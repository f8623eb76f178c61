"""A teacher behind a server: it says what one with the same weights does that is loaded here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.preflight import teachers
from penstock.pipeline.preflight.report import Report
from penstock.protocols.experience import ExperienceError
from penstock.services.modeling.served_teacher import ServedTeacher
from penstock.services.modeling.teacher import Teacher
from penstock.services.runtime import asking
from penstock.services.runtime.asking import AskingError
from penstock.services.runtime.custom_scorer import CustomScorer, ScorerConfig
from penstock.services.runtime.scorer import ScoringTask
from tests.conftest import TINY, make_group
from tests.reward.serving import serving

ROOT = Path(__file__).parents[2]


class Server(BaseHTTPRequestHandler):
    """Says what vLLM's does of a prompt's tokens, as tests/e2e/test_vllm.py has it from the real one."""

    model: Any = None
    before: list[int] = []
    """Codes that it answers with first."""
    spoils: Any = staticmethod(lambda said: said)
    reads: list[int] | None = None
    slow_s = 0.0
    asked: list[dict[str, Any]] = []
    keys: list[str | None] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            time.sleep(self.slow_s)
            return self._answer(200 if self.reads else 404, {"tokens": self.reads})
        assert self.path == "/v1/completions", self.path
        self.asked.append(body)
        self.keys.append(self.headers.get("Authorization"))
        if self.before:
            return self._answer(self.before.pop(0), {"error": "busy"})
        return self._answer(200, {"choices": [{"prompt_logprobs": self.spoils(self._of(**body))}]})

    def _of(self, prompt: list[int], prompt_logprobs: int, **_: Any) -> list[dict[str, Any] | None]:
        with torch.no_grad():
            logs = self.model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        said: list[dict[str, Any] | None] = [None]
        for row, token in zip(logs[:-1], prompt[1:], strict=True):
            order = row.argsort(descending=True).tolist()
            shown = dict.fromkeys([token, *order[:prompt_logprobs]])
            said.append(
                {str(t): {"logprob": row[t].item(), "rank": order.index(t) + 1, "decoded_token": "x"} for t in shown}
            )
        return said

    def _answer(self, code: int, said: Any) -> None:
        data = json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(asking, "FIRST_WAIT_S", 0.01)
    torch.manual_seed(0)
    Server.model = Qwen3ForCausalLM(Qwen3Config(**TINY)).eval()
    Server.model.save_pretrained(tmp_path / "model")
    Server.before, Server.asked, Server.keys, Server.reads, Server.slow_s = [], [], [], None, 0.0
    Server.spoils = staticmethod(lambda said: said)
    with serving(Server) as address:
        yield f"{address}/v1"


def groups(count: int) -> list[Any]:
    random = np.random.default_rng(0)
    return [make_group(random, number) for number in range(count)]


@pytest.mark.parametrize("top_k", [None, 4, 51])
def test_it_says_what_a_teacher_does_that_is_loaded_here(url: str, tmp_path: Path, top_k: int | None) -> None:
    here = Teacher(str(tmp_path / "model"), "wise", "cpu", "float32", top_k=top_k)
    served = ServedTeacher(url, "m", "wise", top_k)
    some = groups(3)
    for mine, its in zip(here.score_groups(some, [{}] * 3), served.score_groups(some, [{}] * 3), strict=True):
        assert mine.keys() == its.keys()
        for name in mine:
            assert mine[name].dtype == its[name].dtype and mine[name].shape == its[name].shape
            if name.endswith("_ids"):
                np.testing.assert_array_equal(mine[name], its[name])
            else:
                known = mine[name] > -60  # of all others together nothing is left at 51
                np.testing.assert_allclose(its[name][known], mine[name][known], rtol=2e-3 if top_k else 1e-6, atol=1e-5)
                assert (its[name][~known] < -10).all()
    assert all(body["prompt_logprobs"] == (top_k or 0) for body in Server.asked)
    served.close()


def test_as_many_groups_are_asked_together_as_its_concurrency_has_answers(url: str) -> None:
    some = groups(5)  # of four answers each
    assert [ServedTeacher(url, "m", concurrency=most).at_once(some) for most in (1, 4, 9, 64)] == [1, 1, 2, 5]


def test_a_busy_server_is_asked_again_and_a_key_is_sent(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHERS_KEY", "secret")
    Server.before = [503, 429, 500]
    served = ServedTeacher(url, "m", key_env="TEACHERS_KEY")
    assert served.score_group(groups(1)[0], {})["teacher"].any()
    assert len(Server.asked) == 4 + 3 and set(Server.keys) == {"Bearer secret"}
    with pytest.raises(AskingError, match="answered 400"):
        Server.before = [400]
        served.score_group(groups(1)[0], {})
    served.close()


@pytest.mark.parametrize(
    ("spoils", "says"),
    [
        (lambda said: said[:-1], "tokens"),
        (lambda said: None, "prompt_logprobs"),
        (lambda said: [None] + [{"50": {"logprob": -1.0, "rank": 1}}] * (len(said) - 1), "prompt_logprobs"),
        (lambda said: [t and {i: e | {"logprob": 3.0} for i, e in t.items()} for t in said], "no log-probability"),
        (lambda said: [t and {i: e | {"logprob": "x"} for i, e in t.items()} for t in said], "prompt_logprobs"),
    ],
)
def test_an_answer_that_is_none_says_so(url: str, spoils: Any, says: str) -> None:
    Server.spoils = staticmethod(spoils)
    served = ServedTeacher(url, "m")
    with pytest.raises(AskingError, match=says):
        served.score_group(groups(1)[0], {})
    served.close()


def test_a_silent_server_has_a_deadline(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "FIRST_WAIT_S", 30.0)
    Server.before = [503] * 100
    served = ServedTeacher(url, "m", seconds=0.3)
    with pytest.raises(AskingError, match=r"within 0\.3 s \(options\.seconds\)"):
        served.score_group(groups(1)[0], {})
    served.close()


def test_a_silent_one_says_nothing_of_words_in_time(url: str) -> None:
    Server.reads, Server.slow_s = [1, 2], 0.0
    served = ServedTeacher(url, "m", seconds=0.3)
    assert served.reads("a b") == [1, 2]
    Server.slow_s = 1.0
    began = time.monotonic()
    assert served.reads("a b") is None and time.monotonic() - began < 0.9
    served.close()


def test_an_answer_that_is_refused_costs_its_group_alone(url: str) -> None:
    options = {"url": url, "model": "m"}
    made = CustomScorer(ScorerConfig(scorer="served_teacher", columns={"wise": "token"}, options=options), "wise")
    said: list[tuple[int, str]] = []

    def answer(
        task: ScoringTask, column: str, values: Any = None, errors: Any = (), unusable: str = "", **_: Any
    ) -> None:
        said.append((task.key[1], unusable))

    tasks = [ScoringTask(("train", group.number), group, ("wise",), {}, 0) for group in groups(5)]
    for _ in range(4):  # which is not taken for a reason to ask one by one
        Server.before, said[:] = [400], []
        assert made.score(tasks, answer) == []
        assert sorted(number for number, _ in said) == [0, 1, 2, 3, 4]
        assert [("400" in why) for _, why in said].count(True) == 1 == sum(bool(why) for _, why in said)
    made.close()


def test_pictures_are_refused(url: str) -> None:
    group = groups(1)[0]
    object.__setattr__(group.trajectories[0], "pictures", (b"x",))
    served = ServedTeacher(url, "m")
    with pytest.raises(ExperienceError, match="pictures"):
        served.score_group(group, {})
    served.close()


def config(url: str, *more: str) -> Any:
    wise = {"scorer": "served_teacher", "columns": {"wise": "token"}, "options": {"url": url, "model": "m"}}
    taught = {"preset": "distillation", "advantage": {"teachers": {"wise": 1.0}}}
    given = [f"scorers={json.dumps({'wise': wise})}", f"trainer.algorithm={json.dumps(taught)}"]
    return load(ROOT / "configs" / "quickstart.yaml", [*given, *more])


def test_a_config_is_told_what_does_not_go_with_it(url: str) -> None:
    assert config(url).scorers["wise"].top_k == 0
    with pytest.raises(ConfigError, match=r"scorers\.wise: a served_teacher says log-probabilities at temperature 1"):
        config(url, "rollout.sampling.temperature=0.7")
    with pytest.raises(ConfigError, match=r"programs\.NAME\.gpus"):
        config(url, "scorers.wise.gpus=1")


def test_a_look_asks_it_once(url: str) -> None:
    report = Report()
    teachers.look(config(url), report)
    assert len(Server.asked) == 1 and not report.problems and not report.here
    assert "scorers.wise.options: m at" in report.lines[0] and "a token of 8" in report.lines[0]
    Server.before = [400]
    teachers.look(config(url), report)
    assert "scorers.wise.options: " in report.problems[0] and "answered 400" in report.problems[0]
    odd = Report()
    teachers.look(config(url, "scorers.wise.options.topk=4"), odd)
    assert not odd.lines and not odd.problems, "it is told with all scorers"
    nobody = Report()
    teachers.look(config("http://127.0.0.1:9/v1"), nobody)
    assert "scorers.wise.options.url: nobody listens at http://127.0.0.1:9/v1" in nobody.here[0]


def test_a_scorers_process_makes_it_with_its_options(url: str) -> None:
    options = {"url": url, "model": "m", "top_k": 2}
    made = CustomScorer(ScorerConfig(scorer="served_teacher", columns={"wise": "token"}, options=options), "wise")
    assert made._scorer.score_group(groups(1)[0], {}).keys() == {"wise", "wise.top2_ids", "wise.top2_logs"}
    made.close()
    with pytest.raises(ValidationError, match="no number of tokens"):
        ScorerConfig(scorer="served_teacher", columns={"wise": "token"}, options={"top_k": "many"})
