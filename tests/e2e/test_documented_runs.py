"""The commands in the README and in docs/, one after the other, as somebody who copies them would. The tutorial's are
run by test_tutorial.py."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, WHOLE
from tests.pipeline.test_documented_commands import in_blocks, words_of

ELSEWHERE = {
    "run configs/quickstart.yaml rollout.engine.type=vllm": "make test-vllm",
    "run configs/quickstart.yaml trainer.optimizer.moments=8bit": "make test-low-bits",
    "run configs/quickstart.yaml trainer.lora.rank=16 trainer.lora.quantize=nf4": "make test-low-bits",
    "run configs/agent.yaml": "tests/e2e/test_agents.py",
    "run configs/quickstart.yaml run.folder=/shared/runs": "tests/e2e/test_join.py",
    "run configs/grpo-32b.yaml": "tests/e2e/test_join.py, with a small model",
    "run configs/grpo-8b.yaml": "tests/engines/test_vllm.py, with a small model",
    "run configs/one-gpu": "tests/e2e/test_colocated.py, with a small model",
    "run configs/recipes/math.yaml model.path=Qwen/Qwen3-4B": "tests/pipeline/test_config.py reads it; needs GPUs",
    "join": "tests/e2e/test_join.py",
    "serve rollout": "tests/e2e/test_remote.py, make two-hosts-test",
    "top": "tests/e2e/test_remote.py",
    "launch slurm": "make slurm-test",
    "launch ray": "make ray-test",
    "agents": "tests/gateway",
    "play": "tests/players",
    "keys": "tests/gateway",
    "page runs/first-try runs/second-try": "tests/e2e/test_page.py",
    "bench": "docs/benchmarks.md has what each has printed",
}
"""Where those are run that need more than a run that has ended."""
BRIEF = [*WHOLE, "trainer.steps=4", "trainer.checkpoint.every=2", "replay.archive=all", "run.deterministic=true"]
IN_PLACE = {
    "FILE": "configs/quickstart.yaml", "RUN": "runs/NAME", "runs/first-try": "runs/NAME", "17": "3",
    "broker.bind=tcp://10.1.0.1:5555": "broker.bind=tcp://127.0.0.1:0",
    "weights.host=10.1.0.0/16": "weights.host=127.0.0.0/8",
    "run.prometheus=127.0.0.1:9400": "run.prometheus=127.0.0.1:0",
}  # fmt: skip
"""What a reader would put there, and what there is on this machine."""
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "commands")]


def prepared(words: list[str], folder: Path, done: int) -> list[str]:
    """The command itself, in ``folder``, as the ``done``-th."""
    found = [IN_PLACE.get(word, word) for word in words]
    checkpoints = sorted((folder / "runs" / "NAME" / "checkpoints").glob("step-[0-9]*"))
    found = [str(checkpoints[-1]) if word == "CHECKPOINT" else word for word in found]
    if words[1] == "prepare":
        found[-1] = "runs/prepared"
    if words[1:3] == ["run", "configs/quickstart.yaml"]:
        found += [*BRIEF, f"run.name={'NAME' if done == 0 else f'other-{done}'}"]
    elif words[1] == "rollback":
        found[2:] = ["runs/other-1", "2"]  # other commands want to see a run that is complete
    elif words[1:3] == ["run", "--resume"]:
        found.append("trainer.steps=14")  # as many as penstock simulate --like wants
    return found


@pytest.mark.chaos
@pytest.mark.timeout(1500)
def test_every_documented_command_does_what_it_says(tmp_path: Path) -> None:
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    commands = [c for page in PAGES for c in in_blocks(page) if c.startswith("penstock") and page.stem != "tutorial"]
    done, known = 0, set(ELSEWHERE)
    for command in dict.fromkeys(shlex.join(words_of(command)) for command in commands):
        rest = command.removeprefix("penstock ")
        if elsewhere := {one for one in ELSEWHERE if rest.startswith(one)}:
            known -= elsewhere
            continue
        mine = prepared(shlex.split(command), tmp_path, done)
        if mine[1] == "page" and "--out" not in mine:
            continue  # it serves until it is told to end: tests/e2e/test_page.py
        found = subprocess.run(mine, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        # A plan that does not fit, and says which would, is an answer too.
        right = (0, 1) if mine[1] == "plan" and "take the first:" in found.stdout else (0,)
        assert found.returncode in right, f"{shlex.join(mine)}\n{found.stdout}\n{found.stderr}"
        assert found.stdout.strip(), mine
        done += 1
    assert done >= 22 and not known, f"no page has these any more: {known}"
    assert all((tmp_path / file).is_file() for file in ("rollouts.parquet", "page.html"))
