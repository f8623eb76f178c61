"""A model of words and pictures, trained on words through the whole pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from penstock.pipeline.models.tiny import ALPHABET, make_tokenizer
from penstock.pipeline.run.summary import steps_of
from tests import families
from tests.e2e.runs import Run, check_promises


def test_it_learns_on_two_ranks_and_what_sees_stays_as_it_came(tmp_path: Path) -> None:
    came = tmp_path / "model"
    families.write("qwen3_5", came)
    make_tokenizer(set(ALPHABET[:48])).save_pretrained(came)
    (came / "preprocessor_config.json").write_text('{"size": 3}')
    config: dict[str, Any] = {
        "model": {"type": "pretrained", "path": str(came)},
        "prompts": {"train": {"type": "sort"}, "eval": {"type": "sort"}, "eval_size": 4},
        "gate": {"max_lag": 1, "groups_per_step": 8},
        "rollout": {
            "count": 1, "engine": {"type": "torch", "max_sequences": 32, "max_length": 48},
            "sampling": {"n": 4, "max_new_tokens": 8},
        },
        "reward": {"functions": [{"function": "tests.e2e.rewards:parity"}]},
        "trainer": {"steps": 2, "ranks": 2, "checkpoint": {"every": 2}},
    }  # fmt: skip
    (path := tmp_path / "config.yaml").write_text(json.dumps(config))
    run = Run(tmp_path, [], path)
    check_promises(run.wait())
    steps = steps_of(run.folder)
    assert steps[0]["mismatch_kl_k3"] < 1e-6 and all(row["grad_norm"] > 0 for row in steps)
    saved = run.folder / "checkpoints/step-000002"
    assert (saved / "preprocessor_config.json").read_text() == '{"size": 3}'
    before, after = load_file(came / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    sees = {name for name in before if ".visual." in name}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert sees and not moved & sees and moved >= {name for name in before if name.endswith("proj.weight")} - sees
