"""Run under torchrun by test_shapes.py: a learner of several ranks beside one of a single process, on the same steps,
the version that each would publish, and a checkpoint taken up in another shape. Arguments: the folder with the models
to begin with, start/ and, where experts are dealt out, mixture/; what the config says of each shape, by name, as JSON,
what ``model`` it begins with, whether what it is asked ``shows`` pictures, and in what ``half`` it computes, with the
head in fp32; and on what device to compute."""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from penstock.protocols.digests import Gmac
from penstock.protocols.versions import digests_of
from penstock.services.learning import checkpoint, joined_files, muon
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.config import CheckpointConfig
from penstock.services.modeling.families import PLAIN
from penstock.services.modeling.parallel.fsdp import forward, full
from penstock.services.modeling.parallel.tensor import is_turned, sum_partial
from penstock.services.modeling.parallel.world import Shape, World, local_device
from penstock.services.modeling.resting import _plain
from penstock.services.modeling.routing import Replay
from penstock.services.modeling.weight_files import WeightFiles
from penstock.services.trainer.canary_scores import score
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.judgements import Judgements
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.rank_setup import load_policy
from penstock.services.weights.byte_views import as_memory
from penstock.services.weights.sender.shard_exporter import ShardExporter
from tests.seeing import shown_step
from tests.trainer import steps
from tests.trainer.head_shapes import check_head
from tests.trainer.steps import Tokenizer

COMMON = {
    "optimizer": {"lr": 1e-3}, "tokens_per_micro_batch": 60, "norms_every": 1,
    "algorithm": {
        "correction": {"type": "truncated", "normalize": True}, "entropy_bonus": 0.01, "distill": {"divergence": "jsd"},
    },
}  # fmt: skip

BESIDE = {"bound": torch.tensor(2.5), "order": torch.arange(3)}
"""Buffers as some families have them in their files."""


def version_of(learner: Learner) -> str:
    """Its digest, of what all ranks write together."""
    source = ShardExporter(learner.published, "float32", 4096, learner.world, Gmac.of_run("test"))
    buffer = torch.zeros(source.layout.nbytes, dtype=torch.uint8)
    source.write(buffer)
    if learner.world.size > 1:
        each = [torch.zeros_like(buffer) for _ in range(learner.world.size)]
        dist.all_gather(each, buffer)
        buffer = torch.stack(each).amax(0)  # bytes that several ranks write would have to be alike
        assert sum(int((part != 0).sum()) for part in each) == int((buffer != 0).sum()), "each byte has one sender"
    return digests_of(source.layout, as_memory(buffer), source.gmac).whole


def whole_weights(learner: Learner) -> dict[str, torch.Tensor]:
    own = {name: full(p.detach()) for name, p in learner.parameters.items()}
    if not learner.stage:
        return own
    every = learner.world.of_stages({name: weight.cpu().numpy() for name, weight in own.items()})
    return {name: torch.tensor(weight, device=learner.device) for name, weight in every.items()}


def check(folder: Path, given: dict[str, Any], kind: str) -> None:
    named, half, shows = given.pop("model", None), given.pop("half", ""), given.pop("shows", False)
    given["algorithm"] = {**COMMON["algorithm"], **given.get("algorithm", {})}  # type: ignore[dict-item]
    config = TrainerConfig.model_validate(COMMON | given)
    kept = ("lora", "freeze", "train_towers", "optimizer", "algorithm")
    same = {key: value for key, value in given.items() if key in kept}
    alone = TrainerConfig.model_validate(COMMON | same)
    device = local_device(torch.device(kind), "trainer")
    world, single = World.of_torchrun(device, Shape.of(config)), World(device)
    mixture = world.shape.expert > 1 and named is None
    start = str(folder.parent / (named or ("mixture" if mixture else "start")))
    if half:
        check_head(start, half, config, alone, world, single)
        return

    def learn(path: str, config: TrainerConfig, world: World) -> Learner:
        model = load_policy(path, start, world, "float32", config)
        if mixture:
            Replay(model)
        return Learner(model, config, 1.0, world)

    def a_step(number: int, routing: bool = False, given: int = 0) -> TrainingBatch:
        step = replace(steps.a_step(number, routing, given), sessions=np.array([0, 0, 0, *range(1, 10)]))
        return shown_step(step, start) if shows else step

    cut, plain = learn(start, config, world), learn(start, alone, single)
    assert version_of(cut) == version_of(plain), "before any step"
    for number in (0, 2):
        away = check_rest(cut)
        assert away or named or (device.type == "cuda" and config.weights_on_host), "what lies on the host stays there"
        # From the same weights, the gradient of every parameter.
        for learner in (cut, plain):
            learner.optimizer.zero_grad(set_to_none=True)
        step = a_step(number, routing=mixture and number > 0, given=3 * (number == 2))
        found = [learner.accumulate(step) for learner in (cut, plain)]
        assert abs(found[0][0] - found[1][0]) <= 1e-5 * abs(found[1][0]), found
        sum_partial(cut.model, cut.parameters, world)
        if cut.stage:
            cut.stage.sum_tied(cut.parameters)
        for name, parameter in cut.parameters.items():
            mine, wanted = full(parameter.grad).cpu(), plain.parameters[name].grad.cpu()
            off = float((mine - wanted).norm() / wanted.norm().clamp(min=1e-6))
            nearly_nothing = name.endswith(("A_log", "dt_bias", "k_proj.bias"))  # sums of what cancels
            assert off <= (1e-4 if nearly_nothing else 1e-5), (name, off)
        of_ranks, of_one = Judgements(step), Judgements(step)
        mine, other = cut.train(step, judgements=of_ranks), plain.train(step, judgements=of_one)
        assert cut.flops.total == pytest.approx(plain.flops.total), "of all ranks, each pass once"
        counted = plain.model.config.model_type in PLAIN and not mixture and not config.freeze
        assert bool(plain.flops.total) == counted, "not of one with a dense layer, whose sizes are not known"
        np.testing.assert_allclose(of_ranks.values(world), of_one.values(single), atol=1e-4)
        assert np.count_nonzero(of_one.values(single)[0]) == sum(t.sampled for t in step.trajectories)
        layers = [key for key in other if key.startswith("layer/")]
        lengths = [other[key] for key in layers if key.endswith("/grad_norm")]
        assert other["grad_norm"] == pytest.approx(sum(length**2 for length in lengths) ** 0.5, rel=1e-5)
        assert ("router_balance" in other) == bool(config.algorithm.router_balance)
        assert ("routing_other" in other) == (mixture and number > 0)
        if "routing_other" in other:  # a share of choices: where ranks compute a micro-batch for nothing it counts too
            assert abs(mine["routing_other"] - other["routing_other"]) <= 0.05
        for key in (
            "loss",
            "grad_norm",
            "entropy",
            "teacher_divergence",
            "mismatch_kl_k3",
            "is_weight_mean",
            "given_nll",
            "router_balance",
            *layers,
        ):
            if key in other:
                assert abs(mine[key] - other[key]) <= 2e-5 * max(1, abs(other[key])), (key, mine[key], other[key])
        weights = whole_weights(cut)
        for name, parameter in plain.parameters.items():
            off = ~torch.isclose(weights[name].cpu(), parameter.detach().cpu(), rtol=1e-3, atol=1e-5)
            # Where a gradient is next to nothing, AdamW goes whichever way it was rounded.
            assert float(off.float().mean()) <= (0.02 if named else 0), name
            if not is_turned(parameter):
                parameter.data.copy_(weights[name])  # what rounding makes of it is not followed any further
    plain.gather()
    assert version_of(cut) == version_of(plain), "after steps"
    assert score(cut, list(range(2, 9)))
    evaluated, alike = (each.evaluate(a_step(9), lambda rows, of=each: _logprobs(of, rows)) for each in (cut, plain))
    for here, there in zip(evaluated, alike, strict=True):
        np.testing.assert_allclose(here, there, atol=1e-4, err_msg="each rank is told all of it")

    unrewarded = a_step(5)
    unrewarded.values["reward"][:] = float("nan")
    assert cut.train(unrewarded)["grad_norm"] == 0.0, "a step without rewards ends nobody"
    cut.version -= 1
    for name, value in BESIDE.items():
        cut.model.register_buffer(name, value.to(device))
    saver = checkpoint.Saver(cut, Tokenizer(), folder / "checkpoints", CheckpointConfig(keep=1))
    with pytest.MonkeyPatch.context() as slow:
        written, beside = threading.Event(), dist.new_group(backend="gloo")
        slow.setattr(joined_files, "FILE_BYTES", 20_000)  # as large models have them: many files
        if world.rank == 0:  # it clears what is left of an earlier save while the others are ready to write
            slow.setattr(checkpoint, "discard", _late(checkpoint.discard))
            few = psutil.Process().num_fds() + 100
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            slow.setattr(checkpoint, "join_weights", _after(written, checkpoint.join_weights))
        saving = saver.begin()
        if world.rank:
            saving.result()
        world.share(b"written", beside)
        written.set()
        path = saving.result()
    world.share(b"saved")
    with WeightFiles(path) as files:
        for name, value in () if cut.adapted else BESIDE.items():
            assert torch.equal(files.block(name, (slice(None),) * value.ndim), value), name
    for where, how in ((world, config), (single, alone)):
        again = learn(str(path), how, where)
        checkpoint.restore(again, path)
        assert version_of(again) == version_of(cut), "as it was saved"
        for name, parameter in cut.parameters.items():
            one, two = cut.optimizer.state[parameter], again.optimizer.state[again.parameters[name]]
            assert one.keys() == two.keys()
            assert all(torch.equal(full(one[key]).cpu(), full(two[key]).cpu()) for key in one), name


def check_rest(learner: Learner) -> int:
    """It comes back as it was. Returns how many bytes were away."""
    held = [part for tensor in learner._held() for part in _plain(tensor) if part.device.type == learner.device.type]
    before = [part.to("cpu", copy=True) for part in held]
    own = [part.untyped_storage() for part in held if part.untyped_storage().resizable()]  # others are mapped files
    size = sum({storage.data_ptr(): storage.nbytes() for storage in own}.values())
    taken = torch.cuda.memory_allocated(learner.device) if learner.device.type == "cuda" else 0
    learner.rest()
    assert not sum(storage.nbytes() for storage in own)
    if learner.device.type == "cuda":
        assert taken - torch.cuda.memory_allocated(learner.device) >= size, "torch holds it for nobody"
    learner.wake()
    assert all(torch.equal(one.cpu(), two) for one, two in zip(held, before, strict=True))
    return size


def _late(function: Callable[..., None]) -> Callable[..., None]:
    def called(*arguments: Any, **options: Any) -> None:
        time.sleep(0.3)
        function(*arguments, **options)

    return called


def _after(written: threading.Event, join: Callable[..., None]) -> Callable[..., None]:
    """It takes minutes, for which nobody may wait; and opens every file at once."""

    def called(*arguments: Any) -> None:
        assert written.wait(60), "other ranks wait while rank 0 joins what they have written"
        assert len(set(resource.getrlimit(resource.RLIMIT_NOFILE))) == 1, "it may open as many as the system lets it"
        join(*arguments)

    return called


def _logprobs(learner: Learner, rows: Any) -> torch.Tensor:
    return forward(learner.model, rows, 1.0)


def main(folder: Path, shapes: dict[str, dict[str, Any]], kind: str) -> None:
    vars(muon)["precision"] = lambda device: torch.float32  # 16 bits make other weights of other rounding
    for number, (name, given) in enumerate(shapes.items()):
        print("shape:", name, flush=True)  # noqa: T201  # the last one is the one that failed
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        check(own, given, kind)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
