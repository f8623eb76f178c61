"""A model of words and pictures, trained on both through the whole pipeline."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.pipeline.run.command import penstock
from penstock.pipeline.run.summary import steps_of
from tests import seeing, shown
from tests.e2e.runs import ROOT, Run, check_promises


def begun(
    folder: Path, source: dict[str, Any], reward: str, sampling: dict[str, int], trainer: dict[str, Any], **more: Any
) -> Run:
    """Of the model in ``folder``, on prompts that show pictures."""
    engine = {"type": "torch", "max_sequences": 64, "max_length": 64}
    config: dict[str, Any] = {
        "model": {"type": "pretrained", "path": str(folder / "model")},
        "prompts": {"train": source, "eval": source, "eval_size": 16},
        "gate": {"max_lag": 1, "groups_per_step": 8},
        "rollout": {"count": 1, "engine": engine, "sampling": sampling},
        "reward": {"functions": [{"function": reward}]},
        "trainer": trainer,
        **more,
    }
    (path := folder / "config.yaml").write_text(json.dumps(config))
    return Run(folder, [], path)


@pytest.mark.parametrize("towers", [pytest.param(False, marks=pytest.mark.chaos), True], ids=["stay", "learn"])
def test_it_learns_on_two_ranks(towers: bool, tmp_path: Path) -> None:
    """What sees stays as it came, unless it is to learn: then it moves, and rollouts see by each version. A critic is
    shown the same, with towers that stand still."""
    came = tmp_path / "model"
    seeing.write("qwen3_5", came)
    rows: list[dict[str, Any]] = [{"question": f"say {n}", "image": None, "answer": str(n)} for n in range(8)]
    for name, colour in shown.COLOURS.items():
        (tmp_path / f"{name}.png").write_bytes(shown.picture(colour))
        rows.append({"question": "what is it", "image": [f"{name}.png"], "answer": name})
        rows.append({"question": "a <image> or <image>?", "image": ["r.png", f"{name}.png"], "answer": name})
    seen = tmp_path / "seen.jsonl"
    seen.write_text("\n".join(json.dumps(row) for row in rows))
    source = {
        "type": "hub", "path": "json", "files": [str(seen)], "prompt_key": "question", "images_key": "image",
        "truth_key": "answer",
    }  # fmt: skip
    trainer: dict[str, Any] = {"steps": 3, "ranks": 2, "checkpoint": {"every": 3}, "train_towers": towers}
    algorithm = {"kl": {"coefficient": 0.001}, "advantage": {"type": "gae" if towers else "grpo"}}
    trainer |= {"algorithm": algorithm, "optimizer": {"lr": 3e-3, "warmup_steps": 0}}
    gate = {"max_lag": 0, "groups_per_step": 8}
    run = begun(tmp_path, source, "tests.e2e.rewards:parity", {"n": 4, "max_new_tokens": 8}, trainer, gate=gate)
    check_promises(run.wait())
    steps = steps_of(run.folder)
    assert all(row["mismatch_kl_k3"] < 1e-6 and row["grad_norm"] > 0 for row in steps)
    kept = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    names = [name for row in kept for name in row.get("pictures", ())]
    assert names and all((run.folder / "pictures" / name).stat().st_size for name in names)
    assert "data:image/jpeg;base64," in (run.folder / "report.html").read_text()
    assert steps[0]["reference_kl"] < 1e-6  # it has seen the same
    saved = run.folder / "checkpoints/step-000003"
    assert (saved / "preprocessor_config.json").read_text() == (came / "preprocessor_config.json").read_text()
    before, after = load_file(came / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    sees = {name for name in before if ".visual." in name}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert sees and moved - sees >= {name for name in before if name.endswith("proj.weight")} - sees
    if towers:
        learned = [json.loads(line) for line in (run.folder / "critic.jsonl").read_text().splitlines()]
        assert [row["critic_step"] for row in learned] == [0, 1, 2] and all(row["critic_loss"] > 0 for row in learned)
        valued = load_file(run.folder / "critic/checkpoints/step-000003/model.safetensors")
        assert all(torch.equal(before[name], valued[name]) for name in sees) and valued["score.weight"].any()
    assert bool(moved & sees) == towers and (not towers or moved >= {n for n in sees if n.endswith("weight")})


@pytest.mark.learning
def test_it_learns_what_it_sees(tmp_path: Path) -> None:
    seeing.write("qwen3_vl", tmp_path / "model")
    source = {"type": "custom", "function": "tests.shown:colours", "pictures": True}
    trainer = {"steps": 100, "optimizer": {"lr": 3e-3, "warmup_steps": 0}}
    summary = begun(tmp_path, source, "exact_match", {"n": 8, "max_new_tokens": 1}, trainer).wait()
    check_promises(summary)
    assert summary["eval_before"] <= 0.25 and summary["eval_after"] >= 0.75


@pytest.mark.learning
def test_it_learns_what_agents_show(tmp_path: Path) -> None:
    seeing.write("qwen3_vl", tmp_path / "model")
    numbers = {"type": "numbers", "size": 64}
    trainer = {"steps": 100, "optimizer": {"lr": 3e-3, "warmup_steps": 0}}
    gateway = {"count": 1, "pictures": True, "tool_calls": "none", "http": "127.0.0.1:0", "bind": "tcp://127.0.0.1:0"}
    run = begun(tmp_path, numbers, "environment", {"n": 8, "max_new_tokens": 1}, trainer, gateway=gateway)
    playing = subprocess.Popen(penstock("play", str(run.folder), "tests.shown:Colour", "--sessions", "32"), cwd=ROOT)
    try:
        summary = run.wait()
        assert playing.wait(60) == 0
    finally:
        playing.kill()
    check_promises(summary)
    assert summary["eval_before"] <= 0.25 and summary["eval_after"] >= 0.75
