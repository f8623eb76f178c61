"""The commands under README's "Use", one after the other, as somebody who copies them would."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, WHOLE
from tests.pipeline.test_documented_commands import words_of

ELSEWHERE = {
    "run configs/quickstart.yaml rollout.engine.type=vllm": "make test-vllm",
    "serve rollout": "tests/e2e/test_remote.py, make two-hosts-test",
    "agents": "tests/gateway",
    "play": "tests/players",
    "keys add": "tests/gateway",
    "bench": "docs/benchmarks.md has what each has printed",
}
"""Where those are run that need more than a run that has ended."""
BRIEF = [*WHOLE, "trainer.steps=4", "trainer.checkpoint.every=2", "replay.archive=all", "run.deterministic=true"]
MORE = {"run configs/quickstart.yaml": BRIEF, "run --resume": ["trainer.steps=6"]}
"""What makes them quick."""


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_every_command_of_the_readme_does_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^```\n(penstock run configs/quickstart.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = 0
    for line in block.splitlines():
        words = words_of(line)
        rest = " ".join(words[1:])
        if any(rest.startswith(known) for known in ELSEWHERE):
            continue
        more = next((more for known, more in MORE.items() if rest.startswith(known)), [])
        if rest.startswith("run configs/quickstart.yaml"):
            more = [*more, f"run.name={'NAME' if done == 0 else f'other-{done}'}"]
        checkpoint = next((tmp_path / "runs" / "NAME" / "checkpoints").glob("step-[0-9]*"), Path("CHECKPOINT"))
        put = {"FILE": "configs/quickstart.yaml", "CHECKPOINT": str(checkpoint)}
        if rest.startswith("prepare"):
            put["runs/NAME"] = "runs/prepared"
        command = shlex.join([*(put.get(word, word) for word in words), *more])
        found = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert found.returncode == 0, f"{command}\n{found.stdout}\n{found.stderr}"
        assert found.stdout.strip(), command
        done += 1
    assert done >= 13
    assert (tmp_path / "rollouts.parquet").is_file()
