"""A model that is read alone, its layers on several devices.

Here all tensors are on the CPU. That nothing meets what lies on another device is shown by torch's tensors without
contents, which know a device that is not there; that the numbers are the same, by real ones on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from penstock.pipeline.models.tiny import make_tokenizer
from penstock.protocols.columns import REFERENCE
from penstock.protocols.experience import Group
from penstock.services.modeling import attention, by_trajectory, packing, reward_model, spread, state_mixers, teacher
from penstock.services.modeling.load import ModelError, devices_of, load_model
from penstock.services.modeling.logprobs import layout_of, logprobs
from penstock.services.modeling.packing import plan_rows
from penstock.services.modeling.reward_model import RewardModel
from penstock.services.modeling.spread import dealt
from penstock.services.modeling.teacher import Teacher
from penstock.services.modeling.towers import decoder_of
from penstock.services.reference import service
from penstock.services.reference.config import ReferenceConfig
from penstock.services.reference.service import Reference
from penstock.services.runtime.custom_scorer import SEVERAL
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.scorer import ScoringTask
from tests import families
from tests.conftest import TINY, make_group

CPU = torch.device("cpu")
THREE = [torch.device("cpu", index) for index in range(3)]


def test_layers_are_dealt_by_their_bytes() -> None:
    assert dealt([1] * 80, 5, 5, 4) == [0] * 17 + [1] * 23 + [2] * 22 + [3] * 18
    assert dealt([4, 1, 1, 1, 1], 0, 0, 2) == [0, 1, 1, 1, 1]
    assert dealt([10, 10, 10], 0, 60, 2) == [0, 0, 0], "the head alone is more than a half"


def test_a_tied_matrix_counts_on_both_ends(tmp_path: Path) -> None:
    sizes = {**TINY, "vocab_size": 2048, "num_hidden_layers": 8}
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(tmp_path)
    model, mode = load_model(str(tmp_path), "float32", CPU), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        spread.spread(model, THREE[:2], THREE[1], "reference.gpus")
    layers = [next(layer.parameters()).device for layer in model.model.layers]
    assert layers == [THREE[0]] * 4 + [THREE[1]] * 4 and model.lm_head.weight.device == THREE[1]


@pytest.fixture
def in_thirds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny layers are so small beside embedding and head that some devices would have none."""

    def thirds(layers: Sequence[int], before: int, behind: int, count: int) -> list[int]:
        return [number * count // len(layers) for number in range(len(layers))]

    monkeypatch.setattr(spread, "dealt", thirds)
    for module in (attention, packing, state_mixers):  # there is no CUDA to pin memory for
        monkeypatch.setattr(module, "to_device", lambda value, device: value.to(device))


def without_contents(model: nn.Module, mode: FakeTensorMode) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(mode.from_tensor(parameter.detach()), requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else mode.from_tensor(buffer)


class Copies(TorchDispatchMode):
    """From which device to which other, in their order: on GPUs each has two queues wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.device, torch.device]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device != found.device and args[0].device != CPU:
            self.seen.append((args[0].device, found.device))  # what comes from the host waits for one queue
        return found


@pytest.mark.usefixtures("in_thirds")
@pytest.mark.parametrize("family", sorted({*families.TEXT, *families.SEEING} - {"gpt2"}))
def test_nothing_meets_what_lies_on_another_device(family: str, tmp_path: Path) -> None:
    families.write(family, tmp_path)
    model, mode = load_model(str(tmp_path), "bfloat16", CPU).eval(), FakeTensorMode(allow_non_fake_inputs=True)
    without_contents(model, mode)
    group = make_group(np.random.default_rng(0), 0)
    with mode, torch.no_grad():
        spread.spread(model, THREE, THREE[-1], "reference.gpus")
        layers = decoder_of(model).layers
        found = [next(layer.parameters()).device for layer in layers]
        assert found == sorted(found, key=THREE.index) and set(found) == set(THREE)
        layout = layout_of(model, group.trajectories)
        (rows,) = plan_rows(group.trajectories, [0] * 4, 8192, THREE[0], layout, at_end=THREE[-1])
        with Copies() as copies:
            said = logprobs(model, rows, 1.0)
    assert said.device == THREE[-1] and said.shape == rows.mask.shape
    assert set(copies.seen) == {(THREE[0], THREE[1]), (THREE[1], THREE[2])}, "from one to the next"
    assert copies.seen == sorted(copies.seen, key=lambda each: THREE.index(each[0])), "all of it at once"


@pytest.mark.usefixtures("in_thirds")
def test_layers_to_which_what_a_tower_found_is_added_are_where_that_is(tmp_path: Path) -> None:
    families.write("qwen3_vl", tmp_path)
    model, mode = load_model(str(tmp_path), "bfloat16", CPU).eval(), FakeTensorMode(allow_non_fake_inputs=True)
    model.config.vision_config.deepstack_visual_indexes = [0, 1, 2]
    without_contents(model, mode)
    with mode:
        spread.spread(model, THREE, THREE[-1], "reference.gpus")
    found = [next(layer.parameters()).device for layer in decoder_of(model).layers]
    assert found == [*[THREE[0]] * 3, THREE[2]]


def test_what_cannot_be_dealt_out_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families.write("gpt2", tmp_path / "gpt2")
    with pytest.raises(SetupError, match=r"reference\.gpus=2: gpt2 has no list of layers to deal out; set it to 1"):
        spread.spread(load_model(str(tmp_path / "gpt2"), "float32", CPU), [CPU, CPU], CPU, "reference.gpus")
    families.write("qwen3", tmp_path / "qwen3")
    with pytest.raises(SetupError, match=r"gpus=9: the model has 4 layers; take fewer"):
        spread.spread(load_model(str(tmp_path / "qwen3"), "float32", CPU), [CPU] * 9, CPU, "gpus")
    assert devices_of("cpu", 4, "reference.device", "reference.gpus") == (CPU,)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices_of("auto", 2, "reference.device", "reference.gpus")[1] == torch.device("cuda", 1)
    with pytest.raises(ModelError, match=r"^reference\.gpus=4: this process sees 2 GPUs; take fewer"):
        devices_of("auto", 4, "reference.device", "reference.gpus")
    with pytest.raises(ModelError, match=r"^reference\.device: cuda:1 is one GPU, and reference\.gpus=2; set it to"):
        devices_of("cuda:1", 2, "reference.device", "reference.gpus")


def on_two(name: str, count: int, key: str, counts: str) -> tuple[torch.device, ...]:
    """The CPU stands for each of them."""
    return (CPU,) * count


def test_a_reference_on_several_devices_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once it has slept, and once it is refreshed."""
    for version in ("start", "step-000002"):
        Qwen3ForCausalLM(Qwen3Config(**TINY)).save_pretrained(tmp_path / version)
    random = np.random.default_rng(0)
    groups = [make_group(random, number) for number in range(12)]

    def scored(gpus: int, step: int = 0) -> list[np.ndarray]:
        config = ReferenceConfig(gpus=gpus, tokens_per_batch=60, refresh_every=2, device="cpu")
        reference = Reference(config, str(tmp_path / "start"), "float32", 1.0, False, tmp_path)
        found: dict[int, np.ndarray] = {}
        left: Sequence[ScoringTask] = [ScoringTask(("train", g.number), g, (REFERENCE,), {}, step) for g in groups]
        while left:
            left = reference.score(left, lambda task, column, values: found.update({task.group.number: values}))
            turns.append(len(found))
            reference.sleep()
            reference.wake()
        return [found[group.number] for group in groups]

    turns: list[int] = []
    alone, refreshed = scored(1), scored(1, step=2)
    monkeypatch.setattr(service, "devices_of", on_two)
    turns.clear()
    for found, expected in zip(scored(2) + scored(2, step=2), alone + refreshed, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not np.allclose(alone[0], refreshed[0]) and turns[0] > 3, "several passes are begun together"


def test_passes_are_begun_ahead_and_answered_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are devices, before one is waited for."""
    random, log = np.random.default_rng(0), []
    group = make_group(random, 0, n=6)

    def to_host(value: torch.Tensor) -> Any:
        number = len([each for each in log if each > 0]) + 1
        log.append(number)
        return lambda: log.append(-number) or value

    monkeypatch.setattr(by_trajectory, "to_host", to_host)
    passes = list(plan_rows(group.trajectories, range(6), 1, CPU))
    found = by_trajectory.by_trajectory(group.trajectories, passes, lambda rows: rows.mask.float(), ahead=3)
    assert log == [1, 2, 3, 4, -1, 5, -2, 6, -3, -4, -5, -6]
    for trajectory, values in zip(group.trajectories, found, strict=True):
        np.testing.assert_array_equal(values[1:], trajectory.loss_mask[1:] == 1)


def test_a_teacher_and_a_grader_on_several_devices_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(set("pt01"))
    sizes = Qwen3Config(**TINY, num_labels=1)
    Qwen3ForCausalLM(sizes).save_pretrained(tmp_path / "teacher")
    Qwen3ForSequenceClassification(sizes).save_pretrained(tmp_path / "grader")
    tokenizer.save_pretrained(tmp_path / "grader")
    group = make_group(np.random.default_rng(0), 0)

    def said(gpus: int) -> dict[str, np.ndarray]:
        given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "tokens_per_batch": 40, "gpus": gpus}
        scorers: list[Any] = [Teacher(str(tmp_path / "teacher"), top_k=3, **given)]
        scorers.append(RewardModel(str(tmp_path / "grader"), **given))
        return {name: values for each in scorers for name, values in score(each, group).items()}

    alone = said(1)
    for module in (teacher, reward_model):
        monkeypatch.setattr(module, "devices_of", on_two)
    found = said(2)
    assert found.keys() == alone.keys() and len(found) == 4
    for name, values in found.items():
        np.testing.assert_allclose(values, alone[name], atol=1e-3 if "top" in name else 1e-5)


def test_teachers_and_graders_say_of_several_groups_what_they_say_of_each(tmp_path: Path) -> None:
    """Those that fill a pass; and of what each answer begins with as it stands in its own group."""
    Qwen3ForCausalLM(Qwen3Config(**TINY)).save_pretrained(tmp_path / "teacher")
    Qwen3ForSequenceClassification(Qwen3Config(**TINY, num_labels=1)).save_pretrained(tmp_path / "grader")
    make_tokenizer(set("pt01")).save_pretrained(tmp_path / "grader")
    random = np.random.default_rng(0)
    groups = [make_group(random, number, n=3) for number in range(6)]
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "tokens_per_batch": 60}
    teachers = [Teacher(str(tmp_path / "teacher"), top_k=k, **given) for k in (0, 3)]
    for scorer in (*teachers, RewardModel(str(tmp_path / "grader"), **given)):
        assert all(hasattr(scorer, name) for name in SEVERAL) and 1 <= scorer.at_once(groups) < 6
        together = scorer.score_groups(groups, [{}] * 6)
        for found, group in zip(together, groups, strict=True):
            alone = score(scorer, group)
            assert found.keys() == alone.keys()
            for name, values in found.items():
                np.testing.assert_allclose(values, alone[name], atol=1e-3 if "top" in name else 1e-5)


def score(scorer: Any, group: Group) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = scorer.score_group(group, {})
    return found
