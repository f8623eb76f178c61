"""A secret in a config is noted by its key alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.config import load
from penstock.pipeline.preflight import shown_secrets
from penstock.pipeline.preflight.report import Report
from tests.e2e.runs import QUICKSTART

JUDGE = "reward.functions=[{function: exact_match}, {function: 'm:f', options: %s}]"


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        (JUDGE % "{url: 'http://me:pw@judge:8000/v1'}", ["reward.functions.1.options.url"]),
        (JUDGE % "{api_key: sk-pw}", ["reward.functions.1.options.api_key"]),
        (JUDGE % "{api_key: '${JUDGE_KEY}', url: 'http://judge:8000', prompt_key: pw, eos_token: pw}", []),
        ("run.traces=http://me:pw@there:4318", ["run.traces"]),
        ("programs={tool: {command: 'serve --api-key pw --port 80'}}", ["programs.tool.command"]),
        ("programs={tool: {command: 'serve --api-key $KEY --port 80'}}", []),
        ("programs={tool: {command: 'serve --api-key \"$KEY\" --url http://a:$PW@b'}}", []),
        ("programs={tool: {command: 'export OPENAI_API_KEY=pw; serve'}}", ["programs.tool.command"]),
        (
            JUDGE % "{HF_TOKEN: hf_pw, token: pw, headers: {Authorization: Bearer pw}}",
            [f"reward.functions.1.options.{name}" for name in ("HF_TOKEN", "token", "headers.Authorization")],
        ),
        (
            JUDGE % "{args: [serve, --api-key, pw], said: 'Bearer pw'}",
            [f"reward.functions.1.options.{name}" for name in ("args", "said")],
        ),
        ("store.url=redis://:pw@there:6379", []),
    ],
)
def test_its_key_is_noted_and_its_value_is_not(given: str, keys: list[str]) -> None:
    report = Report()
    shown_secrets.look(load(QUICKSTART, [given]), report)
    assert [note.partition(": it has a secret")[0] for note in report.notes] == keys
    assert "pw" not in "".join(report.notes)


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_config_of_ours_has_one(path: Path) -> None:
    report = Report()
    shown_secrets.look(load(path), report)
    assert not report.notes
