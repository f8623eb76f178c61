"""A revision behind a hub name: every reader of a model's files takes that one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.pipeline.models.tiny import make_tokenizer
from penstock.services.runtime.hub_names import joined, named

OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"
PROGRAM = """
import sys
import torch
from transformers.utils.logging import set_verbosity_error
from penstock.services.modeling.load import folder_of, load_config, load_model, load_tokenizer
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime import own_code

own_code.trust(True)
set_verbosity_error()
cpu = torch.device("cpu")
for path in sys.argv[1:]:
    model, trained = load_model(path, "float32", cpu), load_trainable(path, World(cpu), cpu, "float32")
    print(load_config(path).hidden_size, model.config.hidden_size, trained.config.hidden_size, end=" ")
    print(len(load_tokenizer(path)), folder_of(path).name)
"""


def test_each_name_has_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named("Qwen/Qwen3-0.6B@c1899de") == ("Qwen/Qwen3-0.6B", "c1899de")
    assert named("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", None)
    assert named("Qwen/Qwen3-0.6B@refs/pr/3") == ("Qwen/Qwen3-0.6B", "refs/pr/3")
    assert named("./model@home") == ("./model@home", None)
    assert joined("Qwen/Qwen3-0.6B", "c1899de") == "Qwen/Qwen3-0.6B@c1899de"
    assert joined("/cache/of/it", "c1899de") == "/cache/of/it" and joined("Qwen/Qwen3-0.6B", None) == "Qwen/Qwen3-0.6B"
    (tmp_path / "me@home").mkdir()
    monkeypatch.chdir(tmp_path)
    assert named("me@home") == ("me@home", None), "a folder that is here"


def test_a_models_files_are_those_of_its_revision(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    home = tmp_path / "hub" / "models--me--tiny"
    sizes = {OLD: (32, "abc"), NEW: (64, "abcdef")}
    for revision, (size, alphabet) in sizes.items():
        folder = home / "snapshots" / revision
        make_tokenizer(set(alphabet)).save_pretrained(folder)
        config = Qwen2Config(
            vocab_size=16, hidden_size=size, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1,
        )  # fmt: skip
        Qwen2ForCausalLM(config).save_pretrained(folder)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(NEW)
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM, "me/tiny", f"me/tiny@{OLD}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=120)
    said = [line.split() for line in done.stdout.splitlines()]
    tokens = {revision: len(make_tokenizer(set(alphabet))) for revision, (_, alphabet) in sizes.items()}
    assert said == [[*["64"] * 3, str(tokens[NEW]), NEW], [*["32"] * 3, str(tokens[OLD]), OLD]], done.stderr
