"""Peak memory of one process of a run, by its own code on tensors without contents: nothing is computed, no GPU is
there, and every allocation is counted with its size and its life.

Run as a program, it measures one process of one config and prints JSON: torch has one process group of ranks.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.pipeline.config import Config, load
from penstock.pipeline.resources.model_files import config_file
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.trainer_memory import at_once, keeps_whole_gradients, of_stage
from penstock.protocols.digests import Gmac
from penstock.services.learning import host_moments, muon
from penstock.services.modeling import attention, head
from penstock.services.modeling.attention import Segments
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.four_bit import in_four_bits
from penstock.services.modeling.lengths import longest_sequence, positions_of
from penstock.services.modeling.load import attention_of, empty_model, load_config
from penstock.services.modeling.logprobs import logprobs
from penstock.services.modeling.lora import Adapter, adapted_layers
from penstock.services.modeling.packing import Rows
from penstock.services.modeling.parallel import expert, start
from penstock.services.modeling.parallel.fsdp import clip_gradients, forward, shard
from penstock.services.modeling.parallel.tensor import sum_partial
from penstock.services.modeling.parallel.world import Shape as Ranks
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.gpus import GIB
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.weights.parts import runs_of
from penstock.services.weights.queues import HostQueue
from penstock.services.weights.sender import shard_exporter
from penstock.services.weights.sender.device_stage import DeviceStage
from penstock.services.weights.sender.shard_exporter import ShardExporter

ROUND = 512
"""CUDA's allocator gives multiples of it."""
CPU = torch.device("cpu")
MICRO_BATCHES = 2
"""Of a step: the second one has the gradient of the first beside it."""


class Memory(TorchDispatchMode):
    """Counts storages from the operation that makes them until nobody has them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        """Bytes."""
        self._sizes: dict[int, int] = {}
        self._hosts: set[int] = set()
        """Those of them that lie in the host's memory, and take none of the device's."""
        self._on_host = False
        """What is made now lies there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``func``; of a cut tensor the parts are counted, when their own turn comes."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            if self._on_host:
                self._hosts.add(key)
            self._resized(key, storage.nbytes())
            weakref.finalize(storage, self._gone, key)

    def _resized(self, key: int, nbytes: int) -> None:
        size = 0 if key in self._hosts else -(-nbytes // ROUND) * ROUND
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
        self._hosts.discard(key)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """What is made in it lies there."""
        self._on_host = True
        try:
            yield
        finally:
            self._on_host = False

    def host_keeps_saved(self) -> AbstractContextManager[Any]:
        """As `torch.autograd.graph.save_on_cpu`, where host and device are told apart by this count alone."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            with self.on_host():
                return tensor.clone()

        return torch.autograd.graph.saved_tensors_hooks(pack, torch.Tensor.clone)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """While it is open. FSDP gives gathered units their memory, and takes it, by resizing their storage."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: Any) -> Any:
            found = resize(storage, size)
            if storage._cdata in self._sizes:
                self._resized(storage._cdata, storage.nbytes())
            return found

        torch.UntypedStorage.resize_ = resize_
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize


def trainer_peak(config: Config, gpu_gib: float | None, rank: int = 0) -> float:
    """GiB of ``rank`` in its second step: model, optimizer, gradients, gathered units, activations, logits, and the
    version that is being published."""
    trainer, folder = config.trainer, config_file(config).parent
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=trainer.ranks)
    # Ranks that share a sequence have each a part of it, and the same part of everything else.
    world = World(CPU, rank, trainer.ranks, replace(Ranks.of(trainer), sequence=1))
    # Real ones, made before nothing is real.
    _ = world.fsdp_mesh, world.tensor_mesh, world.expert_fsdp_mesh, world.expert_mesh["expert"].get_group()
    _ = world.cut_group
    shape = shape_of(config)
    assert shape is not None
    whole = keeps_whole_gradients(of_stage(trainer), shape.stage(world.stage, trainer.pipeline_parallel), gpu_gib)
    # Decided above, for a GPU: the learner would look at this machine's memory.
    trainer = trainer.model_copy(update={"sum_gradients": "step" if whole else "micro_batch"})
    model = empty_model(str(folder))
    lora = trainer.lora
    adapter = Adapter.of(lora) if lora else None
    memory = Memory()
    start._prepare(model, adapter, str(folder), config.model.dtype, trainer.freeze, trainer.train_towers)
    head.compute_head_in(model, config.model.head_dtype)
    shard(model, world, config.model.dtype)  # without memory yet, and over meshes that are real
    make = host_moments.HostMeans.__init__

    def made(means: Any, *about: Any) -> None:
        with memory.on_host():
            make(means, *about)

    vars(host_moments)["HostMeans"].__init__ = made
    with memory.counting():
        start._materialize(model, CPU, CPU)
        learner = Learner(model, trainer, 1.0, world)
        rows = _rows(at_once(shape, trainer) // trainer.sequence_parallel)
        source = ShardExporter(
            learner.published, trainer.published_dtype(config.model.dtype), config.weights.bucket_bytes("cuda"), world,
            Gmac.of_run("memory"),
        )  # fmt: skip
        mine = [bucket[world.rank] for bucket in runs_of(source.layout, source.cut)]
        stage = DeviceStage(source.layout, source.pieces, mine, CPU, HostQueue(), source.gmac)
        turns = max(MICRO_BATCHES, trainer.pipeline_parallel + 1)
        for _ in range(2):  # the first makes the optimizer's state, and counts how torch finds out cut shapes
            learner.optimizer.zero_grad(set_to_none=True)
            stage.read(source.putter(), HostQueue().mark())
            memory.peak = memory.now
            losses = learner.early(_loss(model, rows, memory, trainer) for _ in range(turns))
            for turn in range(1, turns + 1):
                loss = next(losses)
                learner.sum_gradients(turn == turns)
                loss.backward()
                del loss
            sum_partial(model, learner.parameters, world)
            clip_gradients(learner.parameters, world, 1.0)
            learner.optimizer.step()
            learner.gather()
    return memory.peak / GIB


def _loss(model: Any, rows: Rows, memory: Memory, trainer: TrainerConfig) -> torch.Tensor:
    with memory.host_keeps_saved() if trainer.offload_activations else nullcontext():
        return forward(model, rows, 1.0).sum()


def reference_peak(config: Config) -> float:
    """GiB of a reference while it scores: weights, activations, logits."""
    from transformers import AutoModelForCausalLM

    folder, memory = str(config_file(config, config.reference.path).parent), Memory()
    about, lora = load_config(folder), config.reference_quantized
    coded = adapted_layers(Adapter.of(lora), folder) if lora else []
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            about, dtype=DTYPES[config.model.dtype], attn_implementation=attention_of(about)
        )
        in_four_bits(model, coded)
    with memory.counting(), torch.no_grad():
        start._materialize(model, CPU, CPU)
        head.compute_head_in(model, config.model.head_dtype)
        memory.peak = memory.now
        longest = longest_sequence(config.rollout.engine, positions_of(about)) or 0
        logprobs(model, _rows(max(config.reference.tokens_per_batch, longest)), 1.0)
    return memory.peak / GIB


def _rows(tokens: int, longest: int = 2048) -> Rows:
    """Sequences of ``longest`` tokens, ``tokens`` in all, one after the other; all of them sampled."""
    starts = [*range(0, tokens, longest), tokens]
    ids = torch.zeros((1, tokens), dtype=torch.int64)
    numbers = np.arange(tokens)
    every = torch.from_numpy(numbers)
    mask = torch.ones((1, tokens), dtype=torch.bool)
    segments = Segments.of(starts, starts, None, CPU)
    return Rows((0,), ids, ids, segments, mask, every, every, numbers, torch.zeros_like(every))


def _balanced(chosen: torch.Tensor, experts: int, group: Any) -> tuple[torch.Tensor, list[int], list[int]]:
    """`expert._traffic` where all experts are chosen alike: which are, nobody knows of tokens without contents."""
    ranks = dist.get_world_size(group)
    each = [len(chosen) // ranks] * ranks
    return chosen.new_empty(experts), each, each


def _as_on_a_gpu(loop: Any, q: Any, k: Any, v: Any, way: attention.Way, segments: Segments) -> torch.Tensor:
    """The kernel's shapes are known without one."""
    return (attention._flash if attention.is_known(q, way) else loop)(q, k, v, way, segments)


def main() -> None:
    """``fake_memory trainer|reference FILE GIB RANK``"""
    what, path, gib, rank = sys.argv[1:5]
    attention._loop = partial(_as_on_a_gpu, attention._loop)
    vars(head)["_widens"] = lambda left, right: left.itemsize == right.itemsize == 2  # as on a GPU, too
    vars(shard_exporter)["copy_bytes"] = lambda source, target: target.copy_(source)  # there are no bytes
    vars(expert)["_traffic"] = _balanced
    vars(muon)["precision"] = lambda device: torch.bfloat16
    World.of_stages = lambda world, mine: dict(mine)  # type: ignore[method-assign, assignment]  # nobody is there
    config = load(Path(path))
    found = trainer_peak(config, float(gib) or None, int(rank)) if what == "trainer" else reference_peak(config)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
