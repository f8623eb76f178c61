"""On a GPU: the same numbers as on a CPU, and how long they take."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.protocols.digests import Gmac
from penstock.services.learning import checkpoint
from penstock.services.learning.config import CheckpointConfig
from penstock.services.modeling import attention, head
from penstock.services.modeling.attention import Segments, Way
from penstock.services.modeling.norms import fuse_norms
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.rollout.engines.torch.sampling import sample
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.weights.byte_views import as_memory
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.gpu_digest import GpuGmac
from penstock.services.weights.sender.shard_exporter import ShardExporter
from tests.conftest import TINY
from tests.gpu.machine import GIB
from tests.trainer.steps import Tokenizer, a_step
from tests.weights.channel import Channel

pytestmark = [pytest.mark.gpu(cuda_only=True), pytest.mark.timeout(600)]
Note = Callable[[str, str], None]


def a_learner(path: Path, device: torch.device) -> Learner:
    world = World(device)
    config = TrainerConfig.model_validate({"optimizer": {"lr": 1e-3}})
    return Learner(load_trainable(str(path), world, device, "bfloat16"), config, 1.0, world)


def save_a_model(path: Path) -> None:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**TINY)).save_pretrained(path)


def test_the_digest_is_the_processors(cuda: torch.device, note: Note) -> None:
    gmac = Gmac.of_run("gpu")
    data = torch.randint(0, 256, (256 << 20,), dtype=torch.uint8)
    on_gpu, digests = data.to(cuda), GpuGmac(gmac, cuda)
    assert digests.bucket(on_gpu) == gmac.bucket(data.numpy())
    torch.cuda.synchronize()
    started = time.monotonic()
    digests.bucket(on_gpu)
    torch.cuda.synchronize()
    note("digest of 256 MiB on the GPU", f"{data.numel() / (time.monotonic() - started) / 1e9:.0f} GB/s")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_head_makes_fp32_of_16_bits_without_a_copy(cuda: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator(cuda).manual_seed(0)
    hidden, weight = (
        torch.randn(*shape, device=cuda, generator=generator).to(dtype).requires_grad_()
        for shape in ((3, 100, 512), (50_000, 512))
    )
    assert head.linear(hidden[:, :0], weight).shape == (3, 0, 50_000)
    head.linear(hidden[:, :1], weight)  # the library's workspace stays
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    logits = head.linear(hidden, weight)
    assert logits.dtype == torch.float32
    assert torch.cuda.max_memory_allocated(cuda) - before < logits.nbytes + weight.nbytes, "fp32 would be twice that"
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    exact = torch.nn.functional.linear(*wide)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-4, atol=1e-3)
    upstream = torch.randn(logits.shape, device=cuda, generator=generator)
    mine = torch.autograd.grad(logits, (hidden, weight), upstream)
    for one, wanted in zip(mine, torch.autograd.grad(exact, wide, upstream.double()), strict=True):
        assert one.dtype == dtype
        assert float((one.double() - wanted).norm() / wanted.norm()) < 0.01


def test_flash_attention_over_packed_rows_is_the_loop(cuda: torch.device) -> None:
    """Sequences of their own, and responses behind a prompt that they share; with a window; with sinks."""
    generator = torch.Generator(cuda).manual_seed(0)
    q, k, v = (
        torch.randn(40, heads, 64, dtype=torch.bfloat16, device=cuda, generator=generator).requires_grad_()
        for heads in (8, 2, 2)
    )
    sinks = torch.randn(8, dtype=torch.bfloat16, device=cuda, generator=generator).requires_grad_()
    keys = np.concatenate([np.arange(20), np.arange(10), np.arange(20, 30), np.arange(10), np.arange(30, 40)])
    rows = (
        Segments.of([0, 25, 40], [0, 25, 40], None, cuda),
        Segments.of([0, 20, 30, 40], [0, 20, 40, 60], keys, cuda),
    )
    ways = (Way(), Way(window=7), Way(sinks=sinks), Way(window=7, sinks=sinks))
    for segments, way in itertools.product(rows, ways):
        own, values = (k, v) if segments.keys is None else (k[segments.keys], v[segments.keys])
        results = []
        for compute, exact in ((attention._flash, False), (attention._loop, True)):  # the loop in fp32
            taken = (q, own, values) if not exact else (q.float(), own.float(), values.float())
            found = compute(*taken, way, segments)
            inputs = (q, k, v) if way.sinks is None else (q, k, v, sinks)
            gradients = torch.autograd.grad(found.float().square().sum(), inputs, retain_graph=True)
            results.append((found, *gradients))
        for one, other in zip(*results, strict=True):
            assert (one.float() - other.float()).norm() <= 2e-2 * other.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norms_are_the_familys_own(tmp_path: Path, cuda: torch.device, dtype: torch.dtype, note: Note) -> None:
    save_a_model(tmp_path)
    ids = torch.arange(2, 20, device=cuda)[None]
    plain = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=dtype).to(cuda)
    fused = copy.deepcopy(plain)
    fuse_norms(fused)
    assert any("forward" in vars(module) for module in fused.modules()), "by itself where there is a GPU"
    found = []
    for model in (plain, fused):
        logits = model(input_ids=ids).logits.float()
        logits.square().mean().backward()
        found.append((logits.detach(), *(p.grad.float() for p in model.parameters())))
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    off = [float((one - other).norm() / other.norm()) for one, other in zip(*found, strict=True)]
    assert max(off) < bound
    note(f"fused norms in {dtype}, beside the family's own", f"{max(off):.1e} relative, at most")


def test_a_trainer_resumes_on_a_gpu(tmp_path: Path, cuda: torch.device, note: Note) -> None:
    save_a_model(tmp_path / "model")
    learner = a_learner(tmp_path / "model", cuda)
    for seed in range(3):
        learner.train(a_step(seed))
    saver = checkpoint.Saver(learner, Tokenizer(), tmp_path / "saved", CheckpointConfig(keep=1))
    path = saver.begin().result()
    again = a_learner(path, cuda)
    checkpoint.restore(again, path)
    for one in (learner, again):
        assert np.isfinite(one.train(a_step(9))["loss"])
    for name, parameter in learner.parameters.items():
        mine, other = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in (parameter, again.parameters[name]))
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
        assert all(value.device.type == "cuda" for value in again.optimizer.state[again.parameters[name]].values())
    note("peak of the trainer's tests", f"{torch.cuda.max_memory_allocated(cuda) / GIB:.2f} GiB")


def test_a_version_is_cast_hashed_and_copied_on_the_gpu(cuda: torch.device, note: Note) -> None:
    """The model may change as soon as it was read; the snapshot is what it was."""
    named = [("w", torch.randn(64 << 20, device=cuda)), ("b", torch.randn(7, device=cuda))]
    wanted = {name: value.bfloat16().cpu() for name, value in named}
    channel = Channel(named, "bfloat16", bucket_mb=64)
    try:
        rollout = channel.join()
        channel.publish(0).committed.result(60)  # memory is registered, and digests' matrices made, once
        channel.settled()
        started = time.monotonic()
        publication = channel.publish(1)
        read = time.monotonic() - started
        for _, value in named:
            value.add_(1)
        publication.committed.result(60)
        took = time.monotonic() - started
        found = rollout.wait(1)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        nbytes = channel.source.layout.nbytes
        note("publish of 128 MB to a host", f"{took:.3f} s, {nbytes / took / 1e9:.1f} GB/s; model read in {read:.3f} s")
    finally:
        channel.close()


def test_the_exporters_digest_is_that_of_its_bytes(cuda: torch.device) -> None:
    named = {"w": torch.randn(1000, 33, device=cuda)}
    gmac = Gmac.of_run("gpu")
    source = ShardExporter(named, "bfloat16", WeightsConfig().bucket_bytes("cuda"), World(cuda), gmac)
    buffer = torch.zeros(source.layout.nbytes, dtype=torch.uint8)
    source.write(buffer)
    assert source.digest() == gmac.whole(source.layout.digest, [gmac.bucket(as_memory(buffer))])


def test_sampling_is_deterministic_where_it_is_asked_for(cuda: torch.device) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        logits = torch.randn(16, 1000, device=cuda)
        ones = torch.ones(16, device=cuda)
        draws = [sample(logits, ones, ones * 0.9, None, ones * 0.5)[0] for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(draws[0], draws[1]) and torch.equal(draws[0], draws[2])
