"""Checkpoints: the transformers layout, with the trainer's own state in ``trainer/`` beside it. No pickle.

Each rank copies its own part to its host, which training waits for; a thread writes it beside the next steps (torch's
distributed checkpoints, as safetensors), and rank 0 joins the weights into whole files. The optimizer's state stays as
it was cut; whoever reads it takes the part that is its own, however many ranks wrote it.
A checkpoint is written aside, synced and renamed, so one that has its name is whole.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from penstock.services.learning.config import CheckpointConfig
from penstock.services.learning.custom_optimizer import Kept
from penstock.services.learning.host_moments import MOMENTS
from penstock.services.learning.joined_files import join_weights, numbered
from penstock.services.learning.model_learner import ModelLearner
from penstock.services.learning.muon import MOMENTUM
from penstock.services.learning.optimizer import custom, keeps_on_device, local, restore_state, state_names
from penstock.services.learning.removal import aside, discard, remove_old, remove_partial
from penstock.services.learning.shard_writer import ShardWriter
from penstock.services.modeling.adapter_files import FILE
from penstock.services.modeling.experts import is_experts, one_as_in_files
from penstock.services.modeling.families import IN_MATRICES
from penstock.services.modeling.files_beside import name_own_code, write_beside
from penstock.services.modeling.generation_config import write_generation_config
from penstock.services.modeling.parallel.fsdp import first_row, of_local
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.pinned import pin
from penstock.services.modeling.weight_files import INDEX, SINGLE
from penstock.services.runtime.checkpoint_folders import OPTIMIZER, STATE, latest, path_of, versions, without_optimizer
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.files import sync
from penstock.services.runtime.processes import raise_file_limit

log = structlog.get_logger()
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")  # a world of one

AVERAGE = "average"
"""In the optimizer's state too, where a learner keeps a running mean of its weights."""
SHARDED = "sharded"
"""Where the ranks' parts of the weights are, until they are joined."""


class CheckpointError(SetupError):
    """A checkpoint that does not fit the model; says how."""


@dataclass(frozen=True)
class _Staged:
    """A version on the host, as it was when it was staged: what this rank has of it."""

    version: int
    files: dict[str, int]
    """Which file each of the weights goes into, of all ranks'."""
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    ledger: list[dict[str, Any]]
    state: dict[str, float]

    @property
    def nbytes(self) -> int:
        """Of this rank's tensors."""
        return sum(local(value).nbytes for value in (*self.weights.values(), *self.optimizer.values()))


class Saver:
    """Saves versions of ``learner`` below ``folder``, one at a time, of which those stay that ``kept`` says. All ranks
    have one and call it alike, but for `remove_old`, which is the first rank's."""

    def __init__(self, learner: ModelLearner, tokenizer: Any, folder: Path, kept: CheckpointConfig) -> None:
        self._learner, self._tokenizer, self._folder, self._kept = learner, tokenizer, folder, kept
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[Path] | None = None
        self._pages: dict[str, torch.Tensor] = {}
        self._told = False

    def begin(self, ledger_tail: Sequence[dict[str, Any]] = ()) -> Future[Path]:
        """Stages the learner's version, and writes it while training goes on. Waits for the save before, where that is
        not done. The future has the checkpoint's path, on rank 0 once it is durable, on any other once its own part is;
        or what went wrong."""
        if self._last is not None:
            self._last.result()
        learner, target = self._learner, path_of(self._folder, self._learner.version)
        there = target.exists() and not without_optimizer(self._folder, learner.version)
        if learner.world.rank == 0 and not there:  # before anybody else looks into it
            discard(target)
            discard(aside(target))
            (aside(target) / "trainer").mkdir(parents=True)
        if learner.world.share(b"is there" if there else b"") == b"is there":  # rank 0 says so for all
            done: Future[Path] = Future()
            done.set_result(target)
            return done
        staged = _Staged(learner.version, *_stage(learner, self._pages), list(ledger_tail), dict(learner.state))
        self._last = self._writer.submit(self._write, staged, target)
        return self._last

    def remove_old(self, spared: Collection[int] = (), busy: Collection[int] = ()) -> None:
        """All but the newest ones, and those of the ``spared`` versions; of what is ``busy`` all stays. What cannot be
        removed now is tried again with the next."""
        left = remove_old(
            self._folder,
            self._kept.keep,
            lambda old: old in spared or bool(self._kept.keep_every and old % self._kept.keep_every == 0),
            None if self._kept.keep_optimizer == "all" else busy,
        )
        if left and not self._told:
            told = sorted(left)[:4]
            log.warning("old checkpoints cannot be removed; they are tried again with each new one", left=told)
        self._told = bool(left)

    def forget_above(self, version: int) -> None:
        """Those of later versions, which others will be called."""
        for later in versions(self._folder):
            if later > version:
                with suppress(OSError):  # without its name it is no checkpoint any more
                    discard(path_of(self._folder, later))

    def close(self) -> None:
        """Until nothing is being written. Raises what went wrong."""
        if self._last is not None:
            self._last.result()
        self._writer.shutdown()

    def _write(self, staged: _Staged, target: Path) -> Path:
        try:
            return self._write_all(staged, target)
        except (Exception, CheckpointException) as error:
            if self._learner.world.rank == 0:  # what is there of it may be what fills the disk
                with suppress(OSError):
                    discard(aside(target))
            failures = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
            for number in (_errno(failed) for failed, _ in failures):
                if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    room, free = staged.nbytes / 2**30, shutil.disk_usage(self._folder).free / 2**30
                    said = f"{os.strerror(number)}: this rank's part of a checkpoint takes {room:.3g} GiB, and "
                    raise OSError(number, f"{said}{free:.3g} GiB are free on the disk of", str(target)) from error
            raise

    def _write_all(self, staged: _Staged, target: Path) -> Path:
        world, folder = self._learner.world, aside(target)
        cut = world.size > 1
        together = {"process_group": world.save_group, "no_dist": not cut}
        weights = ShardWriter(str(folder / SHARDED if cut else folder), staged.files, save_distributed=cut)
        dcp.save(staged.weights, storage_writer=weights, **together)
        if staged.optimizer:
            optimizer = ShardWriter(str(folder / "trainer" / OPTIMIZER), save_distributed=True)
            dcp.save(staged.optimizer, storage_writer=optimizer, **together)
        if world.rank == 0:
            self._finish(staged, folder, target)
        return target

    def _finish(self, staged: _Staged, folder: Path, target: Path) -> None:
        """Takes as long as it takes: the other ranks have written, and wait for nothing."""
        if (sharded := folder / SHARDED).is_dir():
            raise_file_limit()  # all of them are open at once
            join_weights(sharded, folder, staged.files)
            shutil.rmtree(sharded)
        adapted = self._learner.adapted
        if (single := folder / "model-00001-of-00001.safetensors").exists():  # as transformers and peft call it
            single.rename(folder / (FILE if adapted else SINGLE))
            (folder / INDEX).unlink(missing_ok=True)
        if adapted:
            adapted.write_config(folder)
        else:
            self._write_config(folder)
        self._tokenizer.save_pretrained(folder)
        state = {"version": staged.version, "ledger": staged.ledger, "state": staged.state}
        state["optimizer"] = bool(staged.optimizer)
        (folder / "trainer" / STATE).write_text(json.dumps(state))
        for path in folder.rglob("*"):
            sync(path)
        sync(folder)
        folder.rename(target)
        sync(self._folder)
        log.info("checkpoint saved", version=staged.version, path=str(target))

    def _write_config(self, folder: Path) -> None:
        model = self._learner.model
        config = copy.deepcopy(self._learner.config)
        own = [type(model).__name__.removeprefix("FSDP")]
        # A critic began as a policy.
        config.architectures = own if self._learner.VALUED else config.architectures or own
        config.dtype = "float32"
        beside = getattr(model, "penstock_beside", {})
        name_own_code(config, beside)
        config.save_pretrained(folder)
        write_beside(beside, folder)
        if getattr(model, "generation_config", None) is not None:
            write_generation_config(model.generation_config, self._tokenizer, folder)


def _errno(error: BaseException) -> int | None:
    """The system's number of what went wrong; libraries in Rust, such as tokenizers, say it within their words."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def agreed(folder: Path, world: World) -> Path | None:
    """The newest checkpoint that rank 0 sees, for all ranks. Raises `CheckpointError` on one that does not see it."""
    mine = latest(folder) if world.rank == 0 else None
    name = world.share(mine.name.encode() if mine else b"").decode()
    if name and not (folder / name).is_dir():
        raise CheckpointError(f"{folder / name}: rank 0 resumes from it, and rank {world.rank} does not see it")
    return folder / name if name else None


L = TypeVar("L", bound=ModelLearner)


def open_learner(folder: Path, world: World, path: str, make: Callable[[str], L]) -> tuple[L, list[dict[str, Any]]]:
    """The learner that ``make`` makes of the weights of the newest checkpoint below ``folder``, as it was then, or of
    those at ``path``; and the ledger's tail. Removes what a save that was cut short has left."""
    folder.mkdir(parents=True, exist_ok=True)
    if world.rank == 0:
        remove_partial(folder)
    start = agreed(folder, world)
    learner = make(str(start or path))
    if start is None:
        return learner, []
    tail = restore(learner, start)
    log.info("resumed", version=learner.version, path=str(start))
    return learner, tail


def restore(learner: ModelLearner, path: Path) -> list[dict[str, Any]]:
    """Loads the trainer's own state; the model's weights were loaded from ``path`` already. Returns the ledger tail.
    Raises `CheckpointError` where it is another model's. A running mean of the weights that nobody follows any more is
    left out: it would be taken up as it was then."""
    try:
        state = json.loads((path / "trainer" / STATE).read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} has no trainer/{STATE}: copy it with its folder trainer/, from which a run goes on, or begin "
            "a new run with its weights by model.path"
        ) from None
    folder = path / "trainer" / OPTIMIZER
    if state.get("optimizer") and not folder.is_dir():
        raise CheckpointError(
            f"{path} has no trainer/{OPTIMIZER} any more, without which its moments would begin anew: copy it, too, or "
            "begin a new run with its weights by model.path (checkpoint.keep_optimizer=newest leaves older ones none)"
        )
    if folder.is_dir():
        reader = HuggingFaceStorageReader(str(folder))
        sizes = {key: tuple(found.size) for key, found in reader.read_metadata().state_dict_metadata.items()}
        into: dict[str, dict[str, torch.Tensor]] = {}
        hosts = None if keeps_on_device(learner.optimizer) else learner.world
        for name, parameter in learner.parameters.items():
            names = state_names(learner.optimizer, parameter)
            saved = [key.removeprefix(f"{name}/") for key in sizes if key.startswith(f"{name}/")]
            if not saved:  # no update has changed it yet
                continue
            if set(names) != set(saved) - {AVERAGE}:
                raise CheckpointError(
                    f"{learner.SECTION}.optimizer: {path} has {', '.join(sorted(saved))} of {name}, and "
                    f"{', '.join(sorted(names)) or 'nothing'} is wanted; go on with the type, name and options that it "
                    "was saved with"
                )
            kept = [*names, AVERAGE] if AVERAGE in saved and learner.average else names
            if not kept:
                continue
            wanted, found = tuple(parameter.shape), sizes[f"{name}/{kept[-1]}"]
            if found != wanted and found:
                raise CheckpointError(f"{path}: {name} has shape {found}, the model's has {wanted}")
            into[name] = empty_state(parameter, kept, hosts, custom(learner.optimizer))
        flat = {f"{name}/{key}": tensor for name, tensors in into.items() for key, tensor in tensors.items()}
        dcp.load(flat, storage_reader=reader, process_group=learner.world.save_group, no_dist=learner.world.size == 1)
        flat.clear()
        for name in list(into):
            restore_state(learner.optimizer, learner.parameters[name], into.pop(name))
    learner.version = state["version"]
    learner.state |= state.get("state", {})
    return state["ledger"]


def empty_state(
    parameter: torch.Tensor, names: Iterable[str], hosts: World | None = None, kept: Kept | None = None
) -> dict[str, torch.Tensor]:
    """The optimizer's tensors for ``parameter``, by ``names``, to be filled: cut as it is, but for AdamW's ``step``,
    and all on its device, where a fused step looks for them; with ``hosts`` its moments on those, since a device that
    keeps them in 8 bits, or not at all, may have no room for them in fp32. ``kept``: of another optimizer."""
    numbers = ("step",) if kept is None else kept.numbers

    def empty(key: str) -> torch.Tensor:
        if kept and key in kept.plain:
            return torch.zeros((), dtype=torch.float64)
        if key in numbers:
            there = kept is None or key in kept.on_device
            return torch.zeros((), dtype=torch.float32, device=parameter.device if there else "cpu")
        if hosts is None or key not in (*MOMENTS, MOMENTUM):
            return torch.zeros_like(parameter, requires_grad=False)
        if not isinstance(parameter, DTensor):
            return torch.zeros(parameter.shape)
        mine = torch.zeros(parameter.to_local().shape)
        return of_local(parameter, mine, hosts.on_hosts(parameter.device_mesh))

    return {key: empty(key) for key in names}


def _stage(
    learner: ModelLearner, pages: dict[str, torch.Tensor]
) -> tuple[dict[str, int], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Which file each weight goes into; and copies of this rank's part, on its host: of the weights, and of the
    optimizer's state. They lie in ``pages``, by name, from one save to the next: fresh memory takes longer to get than
    to fill, registered memory far longer."""

    def on_host(name: str, value: torch.Tensor | float) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            return torch.tensor(float(value), dtype=torch.float64)
        mine = local(value)
        if name not in pages:
            pages[name] = torch.empty_like(mine, device="cpu")
            if mine.is_cuda:
                pin(pages[name])
        copied = pages[name].copy_(mine, non_blocking=True)
        if learner.world.size == 1 or not isinstance(value, DTensor):
            return copied
        return of_local(value, copied, learner.world.on_hosts(value.device_mesh))

    saved = learner.adapted.saved if learner.adapted else {**learner.parameters, **dict(_buffers(learner))}
    weights: dict[str, torch.Tensor] = {}
    sizes: dict[str, int] = {}
    family = learner.model.config.model_type
    for name, value in saved.items():
        found = on_host(name, value)
        shape = torch.empty(value.shape, dtype=value.dtype, device="meta")
        sizes |= {part: matrix.nbytes for part, matrix in one_as_in_files(family, name, shape)}
        if family in IN_MATRICES and is_experts(name, value) and isinstance(found, DTensor):  # each is whole on a rank
            weights |= one_as_in_files(family, name, found.to_local(), first_row(value))
        else:
            weights |= one_as_in_files(family, name, found)
    sizes = learner.world.of_stages(sizes)
    # peft knows one file for an adapter, however large.
    files = dict.fromkeys(sizes, 1) if learner.adapted else numbered(sizes)
    optimizer: dict[str, torch.Tensor] = {}
    for name, parameter in learner.parameters.items():
        state = learner.optimizer.state.get(parameter, {})
        if kept := custom(learner.optimizer):
            kept.check(name, parameter, state, AVERAGE)
        found = {f"{name}/{key}": value for key, value in state.items() if value is not None}
        optimizer |= {key: on_host(key, value) for key, value in found.items()}
    if learner.device.type == "cuda":
        torch.cuda.synchronize(learner.device)
    return files, weights, optimizer


def _buffers(learner: ModelLearner) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that a checkpoint has: not what is computed from the config, nor what is tied."""
    known, seen = learner.parameters, {id(parameter) for parameter in learner.parameters.values()}
    for name, value in learner.model.state_dict(keep_vars=True).items():
        if name not in known and id(value) not in seen:
            seen.add(id(value))
            yield name, value
