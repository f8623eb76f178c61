"""A checkpoint continues exactly, loads in plain transformers, and is whole or not there."""

from __future__ import annotations

import errno
import json
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import CapturingLogger
from tokenizers import Tokenizer as WordTokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from penstock.protocols.columns import Column, ColumnTable
from penstock.protocols.experience import as_bytes
from penstock.protocols.messages import Batch, Keep, TakenGroup
from penstock.protocols.packed_groups import pack_group
from penstock.services.learning import checkpoint, removal
from penstock.services.learning.batch import BatchError, open_batch
from penstock.services.learning.config import CheckpointConfig
from penstock.services.learning.handed_on import HandedOn
from penstock.services.learning.saving import Saving
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime import checkpoint_folders
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.conftest import TINY, make_group
from tests.trainer.steps import Tokenizer, a_step

CPU = torch.device("cpu")


def a_learner(model: object, offload: bool | str = False, **optimizer: Any) -> Learner:
    given = {"optimizer": {"lr": 1e-3} | optimizer, "offload": offload}
    return Learner(model, TrainerConfig.model_validate(given), 1.0)


def test_training_continues_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    continues_exactly(tmp_path)


def continues_exactly(tmp_path: Path, **how: Any) -> Path:
    """Returns the checkpoint that was gone on from."""
    torch.manual_seed(0)
    learner = a_learner(Qwen3ForCausalLM(Qwen3Config(**TINY)), **how)
    for seed in range(3):
        learner.train(a_step(seed))
    path = checkpoint.Saver(learner, Tokenizer(), tmp_path, CheckpointConfig(keep=2)).begin().result()
    again = a_learner(load_trainable(str(path), World(CPU), CPU, "float32"), **how)
    checkpoint.restore(again, path)
    assert again.version == 3
    for one in (learner, again):
        one.train(a_step(9))
    for (name, a), (_, b) in zip(learner.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert AutoModelForCausalLM.from_pretrained(path).config.model_type == "qwen3"
    return path


def test_what_a_models_folder_says_of_sampling_is_saved_as_it_was(tmp_path: Path) -> None:
    """transformers reads a temperature without ``do_sample``, and refuses to write it."""
    start, told = tmp_path / "start", {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 1}
    Qwen3ForCausalLM(Qwen3Config(**TINY)).save_pretrained(start)
    (start / "generation_config.json").write_text(json.dumps(told))
    learner = a_learner(load_trainable(str(start), World(CPU), CPU, "float32"))
    path = checkpoint.Saver(learner, Tokenizer(), tmp_path / "checkpoints", CheckpointConfig(keep=1)).begin().result()
    assert told.items() <= json.loads((path / "generation_config.json").read_text()).items()
    assert AutoModelForCausalLM.from_pretrained(path).generation_config.temperature == 0.6


def test_what_is_missing_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    path = continues_exactly(tmp_path)
    again = a_learner(load_trainable(str(path), World(CPU), CPU, "float32"))
    shutil.rmtree(path / "trainer" / "optimizer")
    with pytest.raises(checkpoint.CheckpointError, match="has no trainer/optimizer any more"):
        checkpoint.restore(again, path)
    shutil.rmtree(path / "trainer")
    with pytest.raises(checkpoint.CheckpointError, match="has no trainer/state.json: copy it with its folder"):
        checkpoint.restore(again, path)


def test_only_the_newest_are_kept_and_a_torn_one_is_never_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    learner = a_learner(Qwen3ForCausalLM(Qwen3Config(**TINY)))
    saver = checkpoint.Saver(learner, Tokenizer(), tmp_path, CheckpointConfig(keep=2))
    for version in (1, 2, 3):
        learner.version = version
        saver.begin().result()
        saver.remove_old()
    assert checkpoint_folders.versions(tmp_path) == [2, 3]
    for version in (4, 5):
        learner.version = version
        saver.begin().result()
        saver.remove_old(spared=[2])
    assert checkpoint_folders.versions(tmp_path) == [2, 4, 5]
    landmarks = checkpoint.Saver(learner, Tokenizer(), tmp_path, CheckpointConfig(keep=1, every=4, keep_every=4))
    for version in (6, 7, 8, 9):
        learner.version = version
        landmarks.begin().result()
        landmarks.remove_old()
    assert checkpoint_folders.versions(tmp_path) == [4, 8, 9]
    (tmp_path / ".step-000011.partial").mkdir()
    assert checkpoint_folders.latest(tmp_path) == tmp_path / "step-000009"


def test_older_ones_may_lose_the_optimizers_state_and_nothing_else(tmp_path: Path) -> None:
    torch.manual_seed(0)
    learner = a_learner(Qwen3ForCausalLM(Qwen3Config(**TINY)))
    kept = CheckpointConfig(keep=1, every=2, keep_every=2, keep_optimizer="newest")
    saver, whole = checkpoint.Saver(learner, Tokenizer(), tmp_path, kept), dict[int, list[Path]]()
    for seed in range(6):
        learner.train(a_step(seed))
        path = saver.begin().result()
        whole[learner.version] = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
        saver.remove_old(spared=[3], busy=[2])
    assert checkpoint_folders.versions(tmp_path) == [2, 3, 4, 6]
    left = {version: [] for version in (2, 6)}  # somebody is busy with the one, and the other is the newest
    for version in (2, 3, 4, 6):
        path = checkpoint_folders.path_of(tmp_path, version)
        there = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
        gone = [str(file.parent) for file in whole[version] if file not in there]
        assert set(gone) == set(left.get(version, ["trainer/optimizer"])) and set(there) <= set(whole[version])
        assert checkpoint_folders.without_optimizer(tmp_path, version) == bool(gone)
    assert Qwen3ForCausalLM.from_pretrained(tmp_path / "step-000004")
    with pytest.raises(checkpoint.CheckpointError, match="keep_optimizer=newest"):
        checkpoint.restore(a_learner(Qwen3ForCausalLM(Qwen3Config(**TINY))), tmp_path / "step-000004")
    saver.remove_old(spared=[3])
    assert [checkpoint_folders.without_optimizer(tmp_path, each) for each in (2, 3, 4, 6)] == [True, True, True, False]
    learner.version = 4  # as a critic that goes back to a step that it has been at
    saver.begin().result()
    assert not checkpoint_folders.without_optimizer(tmp_path, 4)
    checkpoint.restore(a_learner(Qwen3ForCausalLM(Qwen3Config(**TINY))), tmp_path / "step-000004")


def test_what_cannot_be_removed_ends_nobody_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(path: Path, ignore_errors: bool = False) -> None:
        """As NFS has it where somebody reads a file."""
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    torch.manual_seed(0)
    learner = a_learner(Qwen3ForCausalLM(Qwen3Config(**TINY)))
    saver = checkpoint.Saver(learner, Tokenizer(), tmp_path, CheckpointConfig(keep=1))
    said = CapturingLogger()
    monkeypatch.setattr(checkpoint, "log", said)
    with monkeypatch.context() as patched:
        patched.setattr(removal.shutil, "rmtree", busy)
        for learner.version in (1, 2, 3):
            saver.begin().result()
            saver.remove_old()
    assert [call.method_name for call in said.calls if "cannot be removed" in call.args[0]] == ["warning"], "once"
    assert checkpoint_folders.versions(tmp_path) == [3] and len(list(tmp_path.iterdir())) == 3
    saver.remove_old()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_a_disk_that_is_full_is_told_of_and_left_as_it_was(tmp_path: Path) -> None:
    learner = a_learner(Qwen3ForCausalLM(Qwen3Config(**TINY)))
    saver = checkpoint.Saver(learner, Tokenizer(), tmp_path, CheckpointConfig(keep=1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # a file that grows larger fails likewise
    try:
        with pytest.raises(OSError, match=r"a checkpoint takes 0\.0.* GiB, and .* GiB are free"):
            saver.begin().result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("file", "said"), [("/dev/full", "a checkpoint takes"), ("/nowhere/it", "No such file")])
def test_nothing_is_left_of_one_whose_tokenizer_cannot_be_written(tmp_path: Path, file: str, said: str) -> None:
    """Its library raises errors of no kind."""

    class Written(Tokenizer):
        def save_pretrained(self, folder: Path) -> None:
            WordTokenizer(WordLevel({"a": 0}, unk_token="a")).save(file)

    saver = checkpoint.Saver(
        a_learner(Qwen3ForCausalLM(Qwen3Config(**TINY))), Written(), tmp_path, CheckpointConfig(keep=1)
    )
    with pytest.raises(Exception, match=said):
        saver.begin().result()
    assert not list(tmp_path.iterdir())


TABLE = ColumnTable(columns=(Column(name="reward", scorer="reward", nullable=True),))


def test_what_a_reference_has_yet_to_move_to_stays(tmp_path: Path) -> None:
    class Mailbox:
        def ask(self, message: object, deadline: float) -> Keep:
            return Keep(versions=[])

    learner, left = a_learner(Qwen3ForCausalLM(Qwen3Config(**TINY))), []
    saver = checkpoint.Saver(learner, Tokenizer(), tmp_path / "checkpoints", CheckpointConfig(keep=1))
    handed_on = HandedOn([], 1.0, tmp_path / "checkpoints", tmp_path / "said")
    saving = Saving(learner, saver, Mailbox(), False, handed_on, 2, tmp_path / "reference")  # type: ignore[arg-type]
    for version in range(1, 8):
        learner.version = version
        saving.begin()
        saving.finish(final=False)
        left.append(checkpoint_folders.versions(tmp_path / "checkpoints"))
        if version == 5:
            (tmp_path / "reference" / "step-000004").mkdir(parents=True)
    saving.close()
    assert left == [[1], [2], [2, 3], [2, 4], [2, 4, 5], [6], [6, 7]]


def test_a_batch_that_breaks_the_bound_is_refused() -> None:
    group = make_group(np.random.default_rng(0), 1, versions=(3,))
    taken = TakenGroup(number=1, experience=as_bytes(pack_group(group)), columns={"reward": np.zeros(4, np.float32)})
    assert open_batch(Batch(step=5, seed=0, max_lag=2, groups=[taken], committed=0), TABLE).lags(5).max() == 2
    with pytest.raises(BatchError, match="lags from 3 to 3, bound 2"):
        open_batch(Batch(step=6, seed=0, max_lag=2, groups=[taken], committed=0), TABLE)
    with pytest.raises(BatchError, match="lags from -1"):
        open_batch(Batch(step=2, seed=0, max_lag=2, groups=[taken], committed=0), TABLE)


def test_a_group_that_cannot_be_read_costs_its_step_only_itself() -> None:
    random = np.random.default_rng(0)
    taken = [
        TakenGroup(
            number=number,
            experience=as_bytes(pack_group(make_group(random, number, versions=(3,)))),
            columns={"reward": np.full(4, number, np.float32)},
        )
        for number in range(3)
    ]
    torn = TakenGroup(number=1, experience=taken[1].experience[:-3], columns=taken[1].columns)
    short = TakenGroup(number=2, experience=taken[2].experience, columns={"reward": np.zeros(3, np.float32)})
    step = open_batch(Batch(step=3, seed=0, max_lag=2, groups=[taken[0], torn, short], committed=0), TABLE)
    assert step.unreadable == 2 and step.groups.tolist() == [0] * 4 and step.rewards.tolist() == [0] * 4
    largest = max(int(t.tokens.max()) for t in step.trajectories)
    whole = Batch(step=3, seed=0, max_lag=2, groups=taken[:1], committed=0)
    assert [open_batch(whole, TABLE, vocabulary=largest + more).unreadable for more in (0, 1)] == [1, 0]
