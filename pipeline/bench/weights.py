"""`penstock bench weights`: the weight channel beside memcpy and beside a bare broadcast, in the same run."""

from __future__ import annotations

import logging
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import psutil
import structlog
import torch
from rich.console import Console
from rich.table import Table

from penstock.pipeline.bench.machine import describe
from penstock.pipeline.harness.weight_harness import BARE_BYTES, CPU, WeightHarness
from penstock.protocols.digests import Gmac
from penstock.protocols.versions import Layout
from penstock.services.modeling.parallel.world import World
from penstock.services.weights import delta
from penstock.services.weights.byte_views import as_memory, copy_bytes
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.sender.shard_exporter import ShardExporter

REPEATS = 15
REST_S = 0.2
ROOM_S = 60.0
WARM = 4
"""Publishes before measuring: the memory that versions lie in is new at first."""
SHAPES = {10: (256, 6), 50: (512, 10), 130: (768, 16), 500: (1536, 15), 1000: (2048, 17)}
"""Million parameters, about, to hidden size and layers."""
VOCABULARY = 16384


def model_config(millions: int) -> Any:
    """A Qwen3 of about that size."""
    from transformers import Qwen3Config

    hidden, layers = SHAPES[millions]
    return Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64, max_position_embeddings=512,
        tie_word_embeddings=True,
    )  # fmt: skip


def weights_of(config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random weights with the model's names and shapes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    return {name: torch.empty(p.shape, dtype=dtype).normal_(0, 0.02) for name, p in model.named_parameters()}


class Memcpy:
    """The limit of shared memory: the C library's memcpy of as many bytes between two buffers of a process."""

    def __init__(self, where: Layout) -> None:
        self._source = torch.ones(where.nbytes, dtype=torch.uint8)
        self._target = torch.zeros(where.nbytes, dtype=torch.uint8)
        self._cuts = [where.spans, [(0, where.nbytes)]]
        self()

    def __call__(self) -> tuple[float, float]:
        """GB/s in the same buckets, and as one block: very large ones are written past the cache, which can be twice as
        fast."""
        rates = []
        for spans in self._cuts:
            started = time.monotonic()
            for start, end in spans:
                copy_bytes(self._source[start:end], self._target[start:end])
            rates.append(self._source.numel() / (time.monotonic() - started) / 1e9)
        return rates[0], rates[1]


@dataclass
class Transfer:
    """Medians over the turns of a publish and its limits."""

    rate: float
    """GB/s from the start of a publish until every receiver has the version, checked, in its shadow."""
    limits: list[float]
    """GB/s of memcpy, or of plain gloo: in the same buckets, and as one block."""
    ratios: list[float]
    """To each limit."""


def transfer(named: dict[str, torch.Tensor], transport: str, receivers: int, verify: bool, threads: int) -> Transfer:
    """Publishes, and runs what limits that, in turns."""
    fleet = WeightHarness(named, transport, verify, threads)
    try:
        for _ in range(receivers):
            fleet.join()
        nbytes = fleet.source.layout.nbytes
        memcpy = Memcpy(fleet.source.layout) if transport == "shm" else None
        rates: list[float] = []
        limits: list[tuple[float, float]] = []
        for _turn in range(REPEATS + WARM):
            started = fleet.publish()
            rows = fleet.loaded(receivers)
            rates.append(nbytes / (max(row["at"] for row in rows) - started) / 1e9)
            time.sleep(REST_S)
            limits.append(memcpy() if memcpy else fleet.bare())
            time.sleep(REST_S)
        rates, limits = rates[WARM:], limits[WARM:]
        kinds = list(zip(*limits, strict=True))
        ratios = [statistics.median(r / at for r, at in zip(rates, kind, strict=True)) for kind in kinds]
        return Transfer(statistics.median(rates), [statistics.median(kind) for kind in kinds], ratios)
    finally:
        fleet.close()


def pause(named: dict[str, torch.Tensor], config: Any, threads: int) -> dict[str, float]:
    """What a torch engine that generates all the time feels of a publish."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        fleet = WeightHarness(named, "shm", True, threads, model=folder)
        try:
            fleet.join()
            pauses, publishes, between, around = [], [], [], []
            for _turn in range(REPEATS + 1):
                time.sleep(3.0 if fleet.version >= 0 else 0.0)
                started = fleet.publish()
                (row,) = fleet.loaded(1)
                gaps = [b - a for a, b in zip(row["steps"], row["steps"][1:], strict=False)]
                if fleet.version and gaps:
                    ends = row["steps"][1:]
                    around += [gap for gap, end in zip(gaps, ends, strict=True) if end >= started]
                    between += [gap for gap, end in zip(gaps, ends, strict=True) if end < started]
                    pauses.append(row["pause_s"])
                    publishes.append(row["at"] - started)
            step = statistics.median(between)
            return {
                "publish_s": statistics.median(publishes),
                "pause_s": statistics.median(pauses),
                "pause_share": statistics.median(pauses) / statistics.median(publishes),
                "pause_steps": statistics.median(pauses) / step,
                "step_s": step,
                "step_during_publish_s": statistics.median(around) if around else step,
            }
        finally:
            fleet.close()


def elastic(named: dict[str, torch.Tensor], threads: int) -> dict[str, float]:
    """Seconds until a rollout that joins late serves, over shared memory and over the snapshot port; and until the
    others serve a version in whose gloo broadcast a receiver was killed."""
    found: dict[str, float] = {}
    for transport in ("shm", "snapshot"):
        fleet = WeightHarness(named, transport, True, threads)
        try:
            fleet.join()
            fleet.publish()
            fleet.loaded(1)
            fleet.join(wait=False)
            row = fleet.loaded(1)[0]
            found[f"join_{transport}_s"] = row["at"] - row["joined"]
        finally:
            fleet.close()
    fleet = WeightHarness(named, "gloo", True, threads)
    try:
        names = [fleet.join() for _ in range(3)]
        fleet.publish()
        fleet.loaded(3)
        victim = fleet.processes[names[1]]
        started = fleet.publish()
        time.sleep(0.05)
        victim.send_signal(signal.SIGKILL)
        fleet.fake_broker.bury(names[1])
        rows = fleet.loaded(2)
        found["killed_receiver_s"] = max(row["at"] for row in rows) - started
        started = fleet.publish()
        rows = fleet.loaded(2)
        found["next_publish_s"] = max(row["at"] for row in rows) - started
    finally:
        fleet.close()
    return found


def changes(millions: int, steps: int, rate: float, threads: int, console: Console) -> dict[str, float]:
    """Bytes of a version as changes, beside the whole, after real AdamW steps of a language model from a warm start."""
    from rich.progress import track
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(millions), dtype=torch.float32)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    source = ShardExporter(named, "bfloat16", WeightsConfig().bucket_bytes(), World(CPU), Gmac.of_run("bench"))
    dice = torch.Generator().manual_seed(1)
    old = torch.zeros(source.layout.nbytes, dtype=torch.uint8)
    new = torch.zeros_like(old)
    rows = []
    for step in track(range(steps + 5), description="AdamW steps", console=console, transient=True):
        start = torch.randint(0, VOCABULARY, (2, 1), generator=dice)
        tokens = (start + 7 * torch.arange(64)) % VOCABULARY  # a language of counting, which can be learnt
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step < steps - 1:
            continue
        old, new = new, old
        for _ in source.buckets(new):
            pass
        if step >= steps:
            rows.append(_changes_of(source.layout, old, new))
    middle: dict[str, float] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    return middle


def _changes_of(where: Layout, old: torch.Tensor, new: torch.Tensor) -> dict[str, float]:
    size = elements = 0
    before, after = old.numpy(), new.numpy()
    for start, end in where.spans:
        encoded = delta.encode(before[start:end], after[start:end])
        if encoded is None:
            size, elements = size + end - start, elements + (end - start) // 2
            continue
        rebuilt = before[start:end].copy()
        delta.apply(encoded, rebuilt)
        if as_memory(torch.from_numpy(rebuilt)) != as_memory(new[start:end]):
            raise RuntimeError("the encoding lost something")
        size, elements = size + len(encoded), elements + delta.changes_in(encoded)
    return {
        "density": elements / (where.nbytes / 2),
        "bytes_per_change": size / max(1, elements),
        "times_smaller": where.nbytes / size,
    }


def bench(
    console: Console, sizes: list[int], receivers: list[int], transports: list[str], threads: int, parts: list[str]
) -> None:
    """Prints the tables that ``parts`` names."""
    torch.set_num_threads(threads)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    console.print(f"{describe()}, torch {torch.__version__}, {threads} threads", highlight=False)
    if "transfer" in parts:
        _print_transfers(console, sizes, receivers, transports, threads)
    if "pause" in parts:
        config = model_config(130)
        row = pause(weights_of(config, torch.bfloat16), config, threads)
        _print_row(console, "generation during a publish (130 M, shm, verified; 8 sequences)", row)
    if "elastic" in parts:
        _print_row(
            console, "joining and dying (130 M)", elastic(weights_of(model_config(130), torch.bfloat16), threads)
        )
    if "sparse" in parts:
        row = changes(10, 50, 1e-6, threads, console)
        _print_row(console, "a bf16 version as changes, after 50 AdamW steps at 1e-6 (10 M)", row)


def _print_transfers(
    console: Console, sizes: list[int], receivers: list[int], transports: list[str], threads: int
) -> None:
    table = Table("transport", "parameters", "bf16 MB", "receivers", "limit GB/s", "unverified", "", "verified", "")
    for millions in sizes:
        named = weights_of(model_config(millions), torch.bfloat16)
        nbytes = sum(2 * tensor.numel() for tensor in named.values())
        for transport in transports:
            for count in receivers:
                needed = nbytes * 4  # two snapshots, the limit's two buffers
                if transport == "gloo":  # two snapshots, two buffers in each receiver; the limit's everywhere
                    needed = nbytes * (2 + 2 * count) + min(nbytes, BARE_BYTES) * (1 + count)
                if not _has_room(needed):
                    table.add_row(transport, f"{millions} M", f"{nbytes / 1e6:.0f}", str(count), "no room")
                    continue
                cells = []
                for verify in (False, True):
                    found = transfer(named, transport, count, verify, threads)
                    cells += [f"{found.rate:.2f}", " / ".join(f"{100 * ratio:.0f} %" for ratio in found.ratios)]
                    limits = " / ".join(f"{limit:.2f}" for limit in found.limits)
                    console.print(
                        f"{transport} {millions} M to {count}, {'verified' if verify else 'unverified'}: "
                        f"{found.rate:.2f} of {limits} GB/s", style="dim", highlight=False,
                    )  # fmt: skip
                table.add_row(transport, f"{millions} M", f"{nbytes / 1e6:.0f}", str(count), limits, *cells)
    console.print(
        "the limit: memcpy for shm, a plain broadcast for gloo; in the same buckets / as one block", highlight=False
    )
    console.print(table)


def _has_room(nbytes: int) -> bool:
    """Waits a while: what ended processes held may come back late."""
    deadline = time.monotonic() + ROOM_S
    while nbytes > 0.9 * psutil.virtual_memory().available:
        if time.monotonic() > deadline:
            return False
        time.sleep(1)
    return True


def _print_row(console: Console, title: str, row: dict[str, float]) -> None:
    table = Table(title=title, title_justify="left")
    for key in row:
        table.add_column(key)
    table.add_row(*(f"{value:.4g}" for value in row.values()))
    console.print(table)
