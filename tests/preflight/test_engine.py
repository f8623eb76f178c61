"""What a server over HTTP cannot do is told before a run begins; the config of one that is over can be read."""

from __future__ import annotations

import pytest

from penstock.pipeline.config import load
from penstock.pipeline.preflight import engine
from penstock.pipeline.preflight.report import Report
from tests.e2e.runs import QUICKSTART

ONE, TWO = "url: 'http://a'", "url: ['http://a', 'http://b']"


def looked_at(options: str, *more: str, name: str = "openai") -> Report:
    chosen = f"{{type: plugin, name: {name}, options: {{folder: v, {options}}}}}"
    report = Report()
    engine.look(load(QUICKSTART, [f"rollout.engine={chosen}", "rollout.count=1", *more]), report)
    return report


@pytest.mark.parametrize(
    ("options", "more", "said"),
    [
        (ONE, "rollout.count=2", "rollout.count=2: each rollout loads versions into a server of its own"),
        (TWO, "rollout.count=3", "rollout.engine.options.url names 2; name as many"),
        (ONE, "rollout.sampling.temperature=0.7", "rollout.sampling.temperature=0.7: the server reports"),
        (f"{ONE}, processed: true", "rollout.sampling.top_p=0.9", "rollout.sampling: a server that reports"),
        (ONE, "rollout.sampling={candidates: true, top_k: 5}", "does not say which tokens its sampler kept"),
        ("ulr: 'http://a', " + ONE, "trainer.steps=9", "options.ulr: unknown key; did you mean 'url'?"),
        (
            f"{ONE}, load: [{{path: /a, bdy: {{}}}}]",
            "trainer.steps=9",
            "options.load.0.bdy: unknown key; did you mean 'body'?",
        ),
        (f"{ONE}, deadline_s: soon", "trainer.steps=9", "options.deadline_s: Input should be a valid number"),
        (
            f"{ONE}, max_sequences: 0",
            "trainer.steps=9",
            "options.max_sequences: Input should be greater than or equal to 1, g",
        ),
        ("url: 8000", "trainer.steps=9", "options.url: 8000 is no address; give one, e.g. http://127.0.0.1:8000"),
        ("processed: true", "trainer.steps=9", "rollout.engine.options.url: missing"),
    ],
)
def test_what_a_server_cannot_do_is_a_problem(options: str, more: str, said: str) -> None:
    (problem,) = looked_at(options, more).problems
    assert said in problem


def test_what_it_can_do_is_none() -> None:
    assert not looked_at(ONE).problems and not looked_at(TWO, "rollout.count=2").problems
    assert not looked_at(ONE, "rollout.count=2", "run.elsewhere=[rollout]").problems, "each machine may have its own"
    assert not looked_at(ONE, "rollout.sampling.temperature=0.7", name="sglang").problems
    drawn = "prompts.eval_sampling={held_out: {temperature: 0.6, top_p: 0.95, n: 2}}"
    assert not looked_at(ONE, drawn).problems, "nobody computes with an evaluation's log-probabilities"
    assert not looked_at(ONE, drawn, "gateway.count=1").problems, "nor with those of an agent's"


def test_what_is_not_repeated_is_said() -> None:
    assert "what this engine samples is not" in looked_at(ONE, "run.deterministic=true").notes[0]
