"""Models that are shown pictures: tokens, log-probabilities and samples are those of the family's own code."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.protocols.experience import PICTURE, Group, Prompt, Sampling, Trajectory
from penstock.services.data.picture_files import PictureError, open_picture, size_of
from penstock.services.modeling.by_trajectory import by_trajectory
from penstock.services.modeling.load import empty_model, load_config, load_model
from penstock.services.modeling.logprobs import layout_of, logprobs
from penstock.services.modeling.packing import Layout, plan_passes, plan_rows
from penstock.services.modeling.parallel import start
from penstock.services.modeling.parallel.fsdp import forward, full
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.pictures import PictureReader, placeholder
from penstock.services.modeling.sight import check_shown, give_sight
from penstock.services.modeling.towers import towers
from penstock.services.modeling.version_weights import version_of
from penstock.services.modeling.weight_files import WeightFiles
from penstock.services.reference.config import ReferenceConfig
from penstock.services.reference.service import Reference
from penstock.services.rollout.config import TorchEngineConfig
from penstock.services.rollout.engines.base import Request, RequestError
from penstock.services.rollout.engines.torch.engine import TorchEngine
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.rank_setup import load_policy
from penstock.services.turns.joining import join
from penstock.services.turns.tokenizer import TextError, Tokenizer
from tests import families, seeing, shown

CPU = torch.device("cpu")
RED, GREEN = (shown.picture(shown.COLOURS[name], size) for name, size in (("r", (40, 56)), ("g", (32, 32))))


def asked(content: str, *pictures: bytes) -> Prompt:
    return Prompt(index=0, messages=[{"role": "user", "content": content}], pictures=pictures)


PROMPTS = [
    asked(f"ab{PICTURE}cd", RED),
    asked(f"a{PICTURE}cd{PICTURE}", GREEN, RED),
    asked("abcd"),
    Prompt(index=0, text=f"{PICTURE}{PICTURE}ab", pictures=(GREEN, GREEN)),
]


def sampled(folder: Path, prompts: list[Prompt], model: Any, disturb: bool = False) -> list[Trajectory]:
    """Three answers to each, by the torch engine; which, to ``disturb`` it, forgets its cache in between."""
    text, config = Tokenizer(str(folder)), load_config(str(folder))
    stops = {text.plain.eos_token_id}
    limits = TorchEngineConfig(max_sequences=16, max_length=96)
    engine = TorchEngine(limits, config, "float32", stops, lambda ids: text.decode([ids])[0], path=str(folder))
    engine.swap(engine.prepare(version_of(model)), 0)
    tokens = [text.encode(prompt) for prompt in prompts]
    for number, prompt in enumerate(prompts):
        sampling = Sampling(n=3, max_new_tokens=12)
        engine.submit(Request(number, 1, tokens[number], sampling, pictures=prompt.pictures))
    done, steps = [], 0
    while engine.pending():
        done += engine.step()
        steps += 1
        if disturb and steps == 4:
            engine.sleep()
            engine.wake()
    done.sort(key=lambda c: (c.number, c.sample))
    return [join([tokens[c.number], c], "", c.finish, pictures=prompts[c.number].pictures) for c in done]


WAYS: dict[str, Layout] = {"apart": "apart", "with a mask": "either", "packed": "packed"}
"""How rows may lie."""


def scored(model: Any, trajectories: list[Trajectory]) -> list[np.ndarray]:
    """As trainer and reference do, in any way that the family takes."""
    found, taken = [], layout_of(model, trajectories)
    for layout in dict.fromkeys(["apart", taken, "apart" if taken == "apart" else "packed"]):
        rows = plan_rows(trajectories, [0] * len(trajectories), 512, CPU, layout)
        with torch.no_grad():
            found.append(by_trajectory(trajectories, rows, lambda each: logprobs(model, each, 1.0)))
    for others in found[1:]:
        assert all(np.abs(one - other).max() < 1e-5 for one, other in zip(found[0], others, strict=True))
    return found[0]


@torch.no_grad()
def by_its_own_code(folder: Path, model: Any, trajectory: Trajectory) -> np.ndarray:
    """float32 ``[tokens - 1]``: what transformers says of the whole sequence, told all that its processor gives."""
    told = seeing.told_by_its_processor(folder, model, trajectory)
    return model(**told).logits[0].log_softmax(-1)[:-1].gather(-1, told["input_ids"][0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize("family", seeing.SHOWN)
def test_what_is_shown_counts_alike_for_engine_trainer_and_the_familys_own_code(family: str, tmp_path: Path) -> None:
    seeing.write(family, tmp_path)
    model = load_model(str(tmp_path), "float32", CPU).eval()
    plain = load_model(str(tmp_path), "float32", CPU).eval()
    give_sight(model, str(tmp_path), "float32", CPU)
    trajectories = sampled(tmp_path, PROMPTS, model)
    again = sampled(tmp_path, PROMPTS, model, disturb=True)
    pad = placeholder(model.config)
    for trajectory, other, values in zip(trajectories, again, scored(model, trajectories), strict=True):
        said = trajectory.loss_mask == 1
        assert np.array_equal(trajectory.tokens, other.tokens)
        assert np.abs(trajectory.logprobs[said] - values[said]).max() < 1e-5
        if pad not in trajectory.tokens[said]:  # transformers would take it for another picture
            own = by_its_own_code(tmp_path, plain, trajectory)
            assert np.abs(own[said[1:]] - values[said]).max() < 1e-5


def test_other_pictures_give_other_numbers_and_a_sampled_placeholder_shows_nothing(tmp_path: Path) -> None:
    seeing.write("qwen3_vl", tmp_path)
    model = load_model(str(tmp_path), "float32", CPU).eval()
    give_sight(model, str(tmp_path), "float32", CPU)
    text, prompt = Tokenizer(str(tmp_path)), asked(f"{PICTURE}is", GREEN)
    pad = placeholder(model.config)
    answer = np.array([5, pad, 6, pad], np.int32)

    def seen(picture: bytes, answer: np.ndarray = answer) -> np.ndarray:
        tokens = text.encode(prompt.model_copy(update={"pictures": (picture,)}))
        mask = np.concatenate([np.zeros(len(tokens), np.uint8), np.ones(len(answer), np.uint8)])
        versions = mask.astype(np.int32) - 1
        every = np.concatenate([tokens, answer])
        one = Trajectory(every, mask, np.zeros(len(every), np.float32), versions, pictures=(picture,))
        return scored(model, [one])[0][-len(answer) :]

    green, white = seen(GREEN), seen(shown.picture(shown.COLOURS["w"]))
    assert np.isfinite(green).all() and np.abs(green - white).max() > 1e-4
    assert np.abs(seen(GREEN, answer[:3]) - green[:3]).max() < 1e-5


@pytest.mark.parametrize("family", seeing.SHOWN)
@torch.no_grad()
def test_towers_by_themselves_find_what_the_whole_model_does(family: str, tmp_path: Path) -> None:
    seeing.write(family, tmp_path)
    path = str(tmp_path)
    whole, reader = load_model(path, "bfloat16", CPU).eval(), PictureReader(path)
    give_sight(whole, path, "bfloat16", CPU)
    copied = load_policy(path, path, World(CPU), "bfloat16", TrainerConfig())
    numbers = {name: of.bfloat16() if of.is_floating_point() else of for name, of in reader.numbers(RED).items()}
    own = whole.base_model.get_image_features(**numbers, return_dict=True).pooler_output
    for model in (whole, copied):
        (found,) = model.penstock_sight._looks([RED])
        assert found.vectors.dtype == torch.bfloat16
        assert torch.equal(found.vectors, own.flatten(0, -2) if isinstance(own, torch.Tensor) else torch.cat(own))


def test_a_groups_prompt_and_its_pictures_are_computed_once(tmp_path: Path) -> None:
    seeing.write("qwen3_vl", tmp_path)
    model = load_model(str(tmp_path), "float32", CPU).eval()
    trajectories = sampled(tmp_path, PROMPTS, model)
    other = replace(trajectories[2], pictures=(shown.picture(shown.COLOURS["b"], (40, 56)),))
    groups = [index // 3 for index in range(12)]
    sizes = [len(trajectory.tokens) for trajectory in trajectories]
    prompts = [int(np.flatnonzero(trajectory.loss_mask)[0]) for trajectory in trajectories[::3]]
    (one,) = plan_passes(trajectories, groups, 4096, CPU, "packed")
    rows = one.rows()
    assert one.real == rows.tokens.shape[1] == sum(sizes) - 2 * sum(prompts)
    (one,) = plan_passes([*trajectories[:2], other], [0, 0, 0], 4096, CPU, "packed")
    assert one.real == sum(sizes[:3]) - prompts[0], "another picture of that size is another prompt"


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(
    ("family", "way"), [*((family, way) for family in ("qwen2_5_vl", "qwen3_vl") for way in WAYS), ("gemma3", "apart")]
)
def test_a_trainers_gradient_is_that_of_the_familys_own_code(
    family: str, way: str, learns: bool, tmp_path: Path
) -> None:
    seeing.write(family, tmp_path)
    plain, config = load_model(str(tmp_path), "float32", CPU).eval(), TrainerConfig(train_towers=learns)
    mine = load_policy(str(tmp_path), str(tmp_path), World(CPU), "float32", config).eval()
    pad = placeholder(plain.config)
    trajectories = [t for t in sampled(tmp_path, PROMPTS[:2], plain) if pad not in t.tokens[t.loss_mask == 1]]
    assert trajectories
    for rows in plan_rows(trajectories, [0] * len(trajectories), 512, CPU, WAYS[way]):
        logprobs(mine, rows, 1.0).sum().backward()
    reader = PictureReader(str(tmp_path))
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.tokens[None].astype(np.int64))
        read = [reader.numbers(picture) for picture in trajectory.pictures]
        told = {name: torch.cat([each[name] for each in read]) for name in read[0]}
        told["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = (ids == pad).int()
        logits = plain(input_ids=ids, **told).logits[0].log_softmax(-1)
        values = logits[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        values[torch.from_numpy(trajectory.loss_mask[1:] == 1)].sum().backward()
    wanted = dict(plain.named_parameters())
    sees = {name for tower in towers(mine) for name in wanted if name.startswith(tower)}
    assert sees
    for name, parameter in mine.named_parameters():
        if name in sees and not learns:
            assert parameter.grad is None
        elif wanted[name].grad is not None:
            gap = (parameter.grad - wanted[name].grad).norm() / wanted[name].grad.norm().clamp(min=1e-6)
            assert gap < 1e-4, name


@pytest.mark.parametrize("family", seeing.SHOWN)
def test_towers_that_learn_are_cut_and_see_in_16_bits_as_those_that_stand_still(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeing.write(family, tmp_path)
    path, whole = str(tmp_path), load_model(str(tmp_path), "float32", CPU)
    trajectories = sampled(tmp_path, [PROMPTS[0], PROMPTS[2]], whole)
    monkeypatch.delattr(start, "load_model")  # nobody needs all of it on the host
    still, learns = (
        load_policy(path, path, World(CPU), "bfloat16", TrainerConfig(train_towers=learns)) for learns in (False, True)
    )
    for name, buffer in whole.named_buffers():
        assert torch.equal(learns.get_buffer(name), buffer), name
    for rows in plan_rows(trajectories, [0] * len(trajectories), 512, CPU, "apart"):
        of_still, of_learns = forward(still, rows, 1.0), forward(learns, rows, 1.0)
        assert torch.equal(of_still, of_learns)
        of_learns.sum().backward()
    sees = [(name, each) for tower in towers(learns).values() for name, each in tower.named_parameters()]
    used = [full(each.grad) for name, each in sees if not name.startswith("head.")]  # which SigLIP has for others
    assert used and all(each.dtype == torch.float32 and each.isfinite().all() for each in used)


def test_what_towers_that_stand_still_would_compute_with_need_not_be_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeing.write("gemma3", tmp_path)
    monkeypatch.setattr(start, "_counts_places", lambda module: False)  # as of a family that nobody knows
    model = empty_model(str(tmp_path))
    with WeightFiles(tmp_path, model) as files:
        assert [start._buffers_are_known(model, files, learns) for learns in (False, True)] == [True, False]


def test_a_reference_that_is_refreshed_sees_by_its_version(tmp_path: Path) -> None:
    seeing.write("qwen3_vl", start := tmp_path / "start")
    model = load_model(str(start), "float32", CPU).eval()
    trajectories = sampled(start, PROMPTS[:1], model)
    for tower in towers(model).values():
        for parameter in tower.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "step-000002")
    config = ReferenceConfig(device="cpu", refresh_every=2)
    reference = Reference(config, str(start), "float32", 1.0, False, tmp_path)
    group = Group(0, PROMPTS[0], trajectories)
    before = reference._logprobs([group])
    reference._refresh(2)
    give_sight(model, str(start), "float32", CPU)
    for mine, wanted, other in zip(reference._logprobs([group]), scored(model, trajectories), before, strict=True):
        assert np.abs(mine - wanted).max() < 1e-5 < 1e-3 < np.abs(mine - other).max()


def test_what_does_not_fit_costs_its_prompt_alone(tmp_path: Path) -> None:
    seeing.write("qwen3_vl", tmp_path)
    text = Tokenizer(str(tmp_path))
    with pytest.raises(TextError, match="picture 0: 5 bytes that are no picture"):
        text.encode(asked(f"{PICTURE}is", b"no.no"))
    with pytest.raises(TextError, match="has <|image_pad|> 2 times, and shows 1 pictures"):
        text.encode(asked(f"{PICTURE}is<|image_pad|>", GREEN))
    text.plain.chat_template = text.plain.chat_template.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    with pytest.raises(TextError, match="2 pictures became 1 runs of <|image_pad|>: the chat template must put"):
        text.encode(asked(f"{PICTURE}{PICTURE}is", GREEN, RED))
    with pytest.raises(ValueError, match="have 1 times <image>, and its pictures are 2"):
        asked(f"{PICTURE}is", GREEN, RED)


def test_a_text_has_the_frames_that_a_chat_has(tmp_path: Path) -> None:
    for family in ("qwen2_5_vl", "qwen3_vl"):
        seeing.write(family, tmp_path)
        text = Tokenizer(str(tmp_path))
        told = text.encode(Prompt(index=0, text=f"{PICTURE}is", pictures=(GREEN,)))
        assert told.tolist() == text.encode(asked(f"{PICTURE}is", GREEN)).tolist()


@pytest.mark.parametrize(("family", "repeats"), [("qwen2_5_vl", True), ("qwen3_vl", True), ("gemma3", False)])
def test_tokens_by_size_are_those_by_pixels(family: str, repeats: bool, tmp_path: Path) -> None:
    seeing.write(family, tmp_path)
    reader = PictureReader(str(tmp_path))
    assert reader._repeats == repeats
    for size in ((32, 32), (33, 47), (500, 31), (640, 480), (61, 611), (28, 28), (1000, 1000)):
        picture = shown.picture(shown.COLOURS["r"], size)
        by_pixels = reader._read(reader.mark, [open_picture(picture)], add_special_tokens=False)
        assert reader.expansion(picture) == by_pixels
        text, seen = f"a{reader.framed_mark}b{reader.framed_mark}", [open_picture(picture)] * 2
        assert reader.encode(text, [picture] * 2, True).tolist() == reader._read(text, seen, add_special_tokens=False)
    if repeats:
        with pytest.raises(PictureError, match="cannot take the picture: .*aspect ratio"):
            reader.expansion(shown.picture(shown.COLOURS["r"], (9000, 30)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("held", [None, 1, 3, 6])
def test_a_picture_is_seen_as_its_camera_held_it(kind: str, held: int | None) -> None:
    from PIL import Image

    file, said = io.BytesIO(), Image.Exif()
    if held:
        said[0x0112] = held
    Image.new("RGB", (64, 32)).save(file, kind, **({"exif": said} if held else {}))
    assert open_picture(file.getvalue()).size == size_of(file.getvalue()) == ((32, 64) if held == 6 else (64, 32))


def test_who_reads_pictures_otherwise_than_the_policy_says_so(tmp_path: Path) -> None:
    seeing.write("qwen3_vl", tmp_path)
    model = load_model(str(tmp_path), "float32", CPU).eval()
    shown = sampled(tmp_path, PROMPTS[:1], model)
    told = tmp_path / "preprocessor_config.json"
    told.write_text(json.dumps(json.loads(told.read_text()) | {"size": {"shortest_edge": 4096, "longest_edge": 8192}}))
    give_sight(model, str(tmp_path), "float32", CPU)
    for ask in (lambda: check_shown(model, shown), lambda: scored(model, shown)):
        with pytest.raises(PictureError, match=r"model\.path: rows have .* give all the same processor files"):
            ask()


def test_a_model_that_does_not_see_says_so(tmp_path: Path) -> None:
    seeing.write("qwen3_vl", tmp_path / "sees")
    families.write("qwen3", tmp_path / "blind")
    blind = load_model(str(tmp_path / "blind"), "float32", CPU).eval()
    engine = TorchEngine(
        TorchEngineConfig(max_sequences=4, max_length=32),
        blind.config,
        "float32",
        {1},
        str,
        path=str(tmp_path / "blind"),
    )
    tokens = Tokenizer(str(tmp_path / "sees")).encode(PROMPTS[0])
    with pytest.raises(RequestError, match="the prompt shows pictures, and a qwen3 sees none"):
        engine.submit(Request(0, 1, tokens, Sampling(max_new_tokens=4), pictures=(RED,)))
    shown = sampled(tmp_path / "sees", PROMPTS[:1], load_model(str(tmp_path / "sees"), "float32", CPU))
    with pytest.raises(SetupError, match="prompts show pictures, which qwen3 does not see"):
        scored(blind, shown)
