"""The ranks of one learner: what they tell each other. One process is a world of one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.protocols import wire
from penstock.protocols.messages import Batch
from penstock.services.runtime.errors import SetupError

T = TypeVar("T")
Order = Literal["publish", "train", "rows", "measure", "save", "skip", "rest", "want", "work", "wait", "end"]
"""What rank 0 tells the others to do."""

DIMENSIONS = ("stage", "replica", "shard", "tensor")
OF_EXPERTS = ("stage", "replica", "shard", "expert", "tensor")
"""Where shards deal out experts: each of `DIMENSIONS`' shards is one of these, and a place in its group."""
DEADLINE = timedelta(minutes=10)
"""For anything that one rank waits for from another; rank 0 speaks more often than that, also when it has no work."""
IDLE_S = 20.0
"""The other ranks hear from rank 0 at least this often."""


@dataclass(frozen=True)
class Shape:
    """How ranks divide the work. What is left of them cuts the model, and with `sequence` together."""

    replicas: int = 1
    """Of the cut model (HSDP)."""
    sequence: int = 1
    """Ranks that share the tokens of a micro-batch (Ulysses)."""
    tensor: int = 1
    """Ranks that share each layer's matrices (tensor parallelism)."""
    expert: int = 1
    """Of the ranks that cut the model, those that share each layer's experts (expert parallelism)."""
    stages: int = 1
    """Runs of layers that ranks of their own hold (pipeline parallelism)."""

    @classmethod
    def of(cls, config: Any) -> Shape:
        """As a learner's config says."""
        return cls(
            config.replicas, config.sequence_parallel, config.tensor_parallel, config.expert_parallel,
            config.pipeline_parallel,
        )  # fmt: skip

    @property
    def together(self) -> int:
        """Ranks that compute the same micro-batch."""
        return self.sequence * self.tensor


class World:
    """Rank ``rank`` of ``size``, in a ``shape`` whose product divides ``size``. Rank 0 is the actor; the others do as
    it says. Ranks are numbered stage by stage, in each replica by replica, then shard by shard (of which those of one
    sequence follow each other), then by their place in tensor parallelism."""

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1, shape: Shape | None = None) -> None:
        self.rank, self.size, self.device, self.shape = rank, size, device, shape or Shape()
        self.breadth = size // self.shape.stages
        """Ranks of one stage."""
        self.stage = rank // self.breadth
        self.shards = self.breadth // (self.shape.replicas * self.shape.tensor)
        """Parts that each replica's rows are cut into."""
        self.data_rank, self.data_size = rank % self.breadth // self.shape.together, self.breadth // self.shape.together
        """Which of how many micro-batches it computes, or its stage of them."""
        self._said_at = time.monotonic()
        self.publish_group: Any = None
        """Of its own, over hosts, so that ranks can agree on a publish beside the training's collectives."""
        self.save_group: Any = None
        """Of its own, over hosts, so that a checkpoint is written beside the training's collectives."""
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=DEADLINE)
            self.publish_group = dist.new_group(backend="gloo", timeout=DEADLINE)
            self.save_group = dist.new_group(backend="gloo", timeout=DEADLINE)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Of all ranks: ``stage``, ``replica``, ``shard``, ``tensor``. Also a world of one has one, for what is cast
        unit by unit."""
        if self.size == 1 and not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=DEADLINE)
        return init_device_mesh(self.device.type, self._sizes, mesh_dim_names=DIMENSIONS)

    @cached_property
    def tensor_mesh(self) -> DeviceMesh:
        """Over which each layer's matrices are cut."""
        return self.mesh["tensor"]

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """Over which a stage's rows are cut, and copied where there are replicas."""
        return self.mesh["replica", "shard"] if self.shape.replicas > 1 else self.mesh["shard"]

    @cached_property
    def cut_group(self) -> Any:
        """Of the ranks that have one replica's stage between them, of several; shard by shard. All ranks must ask at
        once."""
        size = self.shards * self.shape.tensor
        if self.shape.tensor == 1:
            return self.mesh["shard"].get_group()
        return self.group_among(range(first, first + size) for first in range(0, self.size, size))

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """Of all ranks, as those that share experts see them: `OF_EXPERTS`."""
        return init_device_mesh(self.device.type, self._expert_sizes, mesh_dim_names=OF_EXPERTS)

    @cached_property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """Over which a rank's experts are cut, and copied where there are replicas."""
        return self.expert_mesh["replica", "shard"] if self.shape.replicas > 1 else self.expert_mesh["shard"]

    @cached_property
    def _host_mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", self._sizes, mesh_dim_names=DIMENSIONS)

    @cached_property
    def _host_expert_mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", self._expert_sizes, mesh_dim_names=OF_EXPERTS)

    def on_hosts(self, mesh: DeviceMesh) -> DeviceMesh:
        """Of the same ranks' hosts: for copies of what is cut over ``mesh``, a part of `mesh` or `expert_mesh`."""
        names = mesh.mesh_dim_names or ()
        return (self._host_expert_mesh if "expert" in names else self._host_mesh)[names]

    @cached_property
    def sequence_group(self) -> Any:
        """Of the ranks that share a micro-batch's tokens; None where each has its own. All ranks must ask at once."""
        size, tensor = self.shape.sequence, self.shape.tensor
        if size == 1:
            return None
        firsts = range(0, self.size, size * tensor)
        return self.group_among(
            range(first + place, first + size * tensor, tensor) for first in firsts for place in range(tensor)
        )

    @property
    def last_stage(self) -> bool:
        """It has the model's head, and so its losses."""
        return self.stage == self.shape.stages - 1

    @property
    def tells(self) -> bool:
        """Of the ranks that compute a micro-batch together, it is the one that says what comes of it."""
        return self.last_stage and self.rank % self.shape.together == 0

    def column_group(self) -> Any:
        """A new one, of the ranks that have this one's place in each stage. All ranks must ask at once."""
        return self.group_among(range(place, self.size, self.breadth) for place in range(self.breadth))

    def group_among(self, every: Iterable[Sequence[int]]) -> Any:
        """Makes a group of each of ``every`` set of ranks, which are the same on all of them; returns this rank's, None
        where it is in none. All ranks must ask at once."""
        found = None
        for members in every:
            group = dist.new_group(list(members), timeout=DEADLINE)
            found = group if self.rank in members else found
        return found

    @cached_property
    def column(self) -> Any:
        """A `column_group`, for what the last stage tells the others."""
        return self.column_group()

    def of_last_stage(self, values: np.ndarray) -> np.ndarray:
        """What the last stage's rank of this one's column has: float32, of a shape that all know."""
        if self.shape.stages == 1:
            return values
        told = torch.from_numpy(np.ascontiguousarray(values))
        dist.broadcast(told, self.size - self.breadth + self.rank % self.breadth, group=self.column)
        return told.numpy()

    def of_stages(self, mine: Mapping[str, T]) -> dict[str, T]:
        """What all stages have by name, in the model's order; msgpack carries it. Every rank calls it."""
        if self.shape.stages == 1:
            return dict(mine)
        found: dict[str, T] = {}
        for said in self.gather(wire.pack(dict(mine)))[:: self.breadth]:
            for name, value in wire.unpack(said).items():
                found.setdefault(name, value)
        return found

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        return self.shape.stages, self.shape.replicas, self.shards, self.shape.tensor

    @property
    def _expert_sizes(self) -> tuple[int, int, int, int, int]:
        expert = self.shape.expert
        return self.shape.stages, self.shape.replicas, self.shards // expert, expert, self.shape.tensor

    @classmethod
    def of_torchrun(cls, device: torch.device, shape: Shape | None = None) -> World:
        """The world that torchrun has put this process into, or one of its own."""
        return cls(device, int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), shape)

    def named(self, kind: str) -> str:
        """What this rank of a learner calls what is its own."""
        return kind if self.size == 1 else f"{kind}-{self.rank}"

    def share(self, data: bytes = b"", group: Any = None) -> bytes:
        """Rank 0's ``data``, on every rank; over a ``group`` of its own, from a thread of its own."""
        if self.size == 1:
            return data
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=group)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0 and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, 0, group=group)
        return buffer.numpy().tobytes()

    def gather(self, data: bytes, group: Any = None) -> list[bytes]:
        """Every rank's ``data``, in their order, on every rank."""
        if self.size == 1:
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
        longest = max(int(size) for size in sizes)
        if not longest:
            return [b""] * self.size
        mine = torch.zeros(longest, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=group)
        return [whole.numpy()[: int(size)].tobytes() for whole, size in zip(found, sizes, strict=True)]

    def sum(self, values: list[float]) -> list[float]:
        """Each value, of which ranks that compute together have the same, summed over the micro-batches' ranks,
        float64."""
        if self.size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return (total / self.shape.together).tolist()

    def sum_named(self, values: Mapping[str, float]) -> dict[str, float]:
        """The same by name, of which not every rank needs to have all."""
        if self.size == 1:
            return dict(values)
        names = sorted({name for said in self.gather(wire.pack(list(values))) for name in wire.unpack(said)})
        return dict(zip(names, self.sum([values.get(name, 0.0) for name in names]), strict=True))

    def add(self, total: torch.Tensor) -> torch.Tensor:
        """``total`` of every rank, in place, on every rank."""
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def sum_array(self, values: np.ndarray) -> np.ndarray:
        """The same of an array, float32, of one shape on all ranks."""
        if self.size == 1:
            return values
        total = torch.from_numpy(values.copy())
        dist.all_reduce(total)
        return (total / self.shape.together).numpy()

    def max(self, value: float) -> float:
        """The largest over the ranks."""
        if self.size == 1:
            return value
        largest = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def meet(self, patience_s: float) -> None:
        """Waits for all ranks, which may take ``patience_s`` longer than for anything else. While nothing is
        published."""
        if self.size > 1:
            dist.monitored_barrier(self.publish_group, DEADLINE + timedelta(seconds=patience_s))

    def order(self, what: Order, batch: Batch | None = None) -> None:
        """Rank 0 tells the others what comes next."""
        if self.size == 1:
            return
        self._said_at = time.monotonic()
        self.share(wire.pack({"what": what, "batch": batch.model_dump() if batch else None}))

    def keep_awake(self) -> None:
        """Rank 0, while it has no work: the others hear of it before they give up."""
        if self.size > 1 and time.monotonic() - self._said_at > IDLE_S:
            self.order("wait")

    def obey(self) -> tuple[Order, Batch | None]:
        """What rank 0 has told."""
        said = wire.unpack(self.share())
        return said["what"], Batch.model_validate(said["batch"]) if said["batch"] else None

    def close(self) -> None:
        """Leaves the world."""
        if dist.is_initialized():
            dist.destroy_process_group()


def local_device(name: torch.device, key: str) -> torch.device:
    """This rank's own device where ranks share a machine with several GPUs; ``key`` is the section of the learner."""
    if name.index is not None:  # ranks would share it, and what cuts a model looks at the current one alone
        raise SetupError(f"{key}.device={name}: CUDA_VISIBLE_DEVICES says which GPUs it has; set {key}.device=cuda")
    if name.type == "cuda" and "LOCAL_RANK" in os.environ:
        rank, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if rank >= there:
            raise SetupError(
                f"{key}.ranks: rank {rank} of this machine has no GPU of its own, there are {there}; use fewer ranks, "
                f"or {key}.device=cpu"
            )
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    return name
