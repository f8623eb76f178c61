"""What a server over HTTP cannot do is told before a run begins; the config of one that is over can be read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.pipeline.config import load
from penstock.pipeline.preflight import engine
from penstock.pipeline.preflight.report import Report
from penstock.services.rollout.engines.vllm import names
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


VLLMS = """
class EngineArgs:
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""


@pytest.mark.parametrize(
    ("given", "problem", "here"),
    [
        ("gpu_memory_utilization: 0.8, enable_log_requests: true", "", ""),
        ("tensor_model_parallel_size: 2", "verl's tensor_model_parallel_size is rollout.engine.vllm.tensor_para", ""),
        ("free_cache_engine: true", "verl's free_cache_engine is run.placement=colocated", ""),
        ("gpu_memory_utilisation: 0.8", "", "no such engine argument; did you mean 'gpu_memory_utilization'?"),
    ],
)
def test_names_that_vllm_does_not_know_are_told_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, problem: str, here: str
) -> None:
    source = tmp_path / "engine" / "arg_utils.py"
    source.parent.mkdir()
    source.write_text(VLLMS)
    monkeypatch.setattr(names, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[tmp_path]))
    options = [f"rollout.engine={{type: vllm, max_length: 40, vllm: {{{given}}}}}"]

    def found(*more: str) -> Report:
        report = Report()
        engine.look(load(QUICKSTART, [*options, *more]), report)
        return report

    for told, said in ((found().problems, problem), (found().here, here)):
        assert len(told) == bool(said) and all(said in words for words in told)
    assert not found("run.elsewhere=[rollout]").here, "another machine may have another version"
    source.write_text(VLLMS.replace("(EngineArgs)", "(Others)"))
    assert not found().here, "what nobody can read is no mistake"


def test_what_is_not_repeated_is_said() -> None:
    assert "what this engine samples is not" in looked_at(ONE, "run.deterministic=true").notes[0]
