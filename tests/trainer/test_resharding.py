"""A checkpoint of one rank is two ranks', and theirs is one's; nobody reads more than its own rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from penstock.services.learning.checkpoint import empty_state
from penstock.services.learning.host_moments import MOMENTS
from penstock.services.learning.joined_files import join_weights, numbered
from penstock.services.learning.removal import remove_partial
from penstock.services.learning.shard_writer import ShardWriter
from penstock.services.modeling import weight_files
from penstock.services.modeling.load import load_model
from penstock.services.modeling.parallel import start
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from tests.conftest import TINY
from tests.e2e.runs import ROOT
from tests.trainer.resharding_program import CPU, main


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint: joined over the ranks that wrote them, in their order."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("trainer/optimizer/*.safetensors"))):
        for name, value in load_file(path).items():
            found[name] = torch.cat((found[name], value)) if name in found and value.ndim else value
    return found


@pytest.mark.chaos
@pytest.mark.parametrize(("dtype", "kind"), [("float32", "adamw"), ("bfloat16", "adamw"), ("float32", "muon")])
def test_two_ranks_resume_from_one_and_one_from_two(tmp_path: Path, dtype: str, kind: str) -> None:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=True)).save_pretrained(tmp_path / "start")
    main(tmp_path / "start", tmp_path / "one", dtype, 2, kind)
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program += ["-m", "tests.trainer.resharding_program"]
    one = tmp_path / "one" / "step-000002"
    subprocess.run([*program, one, tmp_path / "two", dtype, "0", kind], cwd=ROOT, check=True, timeout=120)
    two = tmp_path / "two" / "step-000002"
    assert len(list((two / "trainer" / "optimizer").glob("*.safetensors"))) == 2, "each rank writes its own"
    again = main(two, tmp_path / "again", dtype, 0, kind)
    before, after = whole(one), whole(tmp_path / "again" / "step-000002")
    assert before.keys() == after.keys() and any(name.endswith(MOMENTS[0]) for name in before)
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
        assert torch.equal(value, whole(two)[name]), name
    assert again.version == 2
    assert type(AutoModelForCausalLM.from_pretrained(two)).__name__ == "Qwen3ForCausalLM"
    # Both go on alike: the third step of one rank is that of two.
    subprocess.run([*program, two, tmp_path / "on-2", dtype, "1", kind], cwd=ROOT, check=True, timeout=120)
    main(one, tmp_path / "on-1", dtype, 1, kind)
    tolerance = {"float32": 1e-5, "bfloat16": 3e-3}[dtype]
    for name, value in whole(tmp_path / "on-1" / "step-000003").items():
        torch.testing.assert_close(value, whole(tmp_path / "on-2" / "step-000003")[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3_text"])
def test_a_model_starts_without_memory_and_is_the_one_in_its_files(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers that are in no file included, in several files, with tied and untied embeddings."""
    monkeypatch.setattr(start, "load_model", None)  # nobody needs all of it at once
    torch.manual_seed(0)
    mixture = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "moe" in family else {}
    config = AutoConfig.for_model(family, **TINY, **mixture, tie_word_embeddings=family != "llama")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / weight_files.INDEX).is_file()
    made, wanted = load_trainable(str(tmp_path), World(CPU), CPU, "float32"), load_model(str(tmp_path), "float32", CPU)
    assert (made.get_output_embeddings().weight is made.get_input_embeddings().weight) == (family != "llama")
    for kind in ("named_parameters", "named_buffers"):
        found, expected = dict(getattr(made, kind)()), dict(getattr(wanted, kind)())
        assert found.keys() == expected.keys() and found
        for name, value in expected.items():
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name


def test_a_rank_reads_its_own_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    read = []
    block = weight_files.WeightFiles.block

    def counted(self: weight_files.WeightFiles, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        found = block(self, name, part)
        read.append(found.shape[0] / self.shape(name)[0])
        return found

    monkeypatch.setattr(weight_files.WeightFiles, "block", counted)
    with weight_files.WeightFiles(tmp_path) as files:
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            first, count = 3, files.shape(name)[0] // 2
            wanted = load_file(tmp_path / "model.safetensors")[name][3 : 3 + count]
            assert torch.equal(files.block(name, (slice(first, first + count),)), wanted)
    assert max(read) <= 0.5


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_is_restored_lies_on_its_parameters_device(device: str) -> None:
    """AdamW's fused step looks for all of it there: its `step` counter on the host ended every resumed GPU run."""
    parameter = torch.nn.Parameter(torch.empty(3, 2, device=device))
    state = empty_state(parameter, ("step", *MOMENTS))
    torch.optim.AdamW([parameter], fused=False)
    assert state.keys() == {"step", *MOMENTS}
    assert all(value.device == parameter.device and not value.requires_grad for value in state.values())


def test_a_large_model_goes_into_several_files_and_a_torn_save_is_removed(tmp_path: Path) -> None:
    sizes = {str(i): 3 << 30 for i in range(4)}
    assert list(numbered(sizes).values()) == [1, 2, 3, 4]
    (tmp_path / ".step-000007.partial" / "trainer").mkdir(parents=True)
    remove_partial(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("matrices", [0, 1, 2])
def test_what_is_no_matrix_of_fractions_is_joined_too(tmp_path: Path, matrices: int) -> None:
    """A number without dimensions (Gemma 4's bounds), and whole ones."""
    weights = {f"w{number}": torch.randn(2, 3) for number in range(matrices)}
    weights |= {"bound": torch.tensor(3.5), "order": torch.arange(4), "marks": torch.tensor([True, False])}
    files = {name: 1 + (name == "w1") for name in weights}
    parts = tmp_path / "parts"
    parts.mkdir()
    dcp.save(weights, storage_writer=ShardWriter(str(parts), files, save_distributed=True), no_dist=True)
    join_weights(parts, tmp_path, files)
    told = json.loads((tmp_path / weight_files.INDEX).read_text())
    assert told["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    assert told["weight_map"].keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(load_file(tmp_path / told["weight_map"][name])[name], value), name
    assert len(list(tmp_path.glob("*.safetensors"))) == matrices + 1
