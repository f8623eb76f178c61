"""A version that is read at once and one that is read bucket by bucket are the same, and so are their digests."""

from __future__ import annotations

import pytest
import torch

from penstock.protocols.cut import Cut
from penstock.protocols.digests import Gmac
from penstock.protocols.versions import BUCKET_BYTES, digests_of
from penstock.services.weights.byte_views import as_memory
from penstock.services.weights.config import UNDER_WAY, WeightsConfig
from penstock.services.weights.layout import make_layout
from penstock.services.weights.parts import Piece, pieces_of, runs_of
from penstock.services.weights.queues import HostQueue
from penstock.services.weights.sender.device_stage import BucketStage, DeviceStage

CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_bytes_and_digests_of_a_version(ranks: int) -> None:
    layout, gmac = make_layout({"a": (9, 8), "b": (5, 8), "c": (30,)}, "bfloat16", 128), Gmac.of_run("test")
    cut = Cut(shards=ranks)
    runs, parts = runs_of(layout, cut), {}
    whole = {kind: torch.zeros(layout.nbytes, dtype=torch.uint8) for kind in (DeviceStage, BucketStage)}
    for kind, buffer in whole.items():
        for rank in range(ranks):

            def put(piece: Piece, target: torch.Tensor, at: int) -> None:
                values = torch.arange(piece.first, piece.first + piece.count, dtype=torch.bfloat16) + 7 * piece.weight
                target[at : at + piece.nbytes] = values.view(torch.uint8)

            mine = [bucket[rank] for bucket in runs]
            stage = kind(layout, pieces_of(layout, rank, cut), mine, CPU, HostQueue(), gmac)
            stage.read(put, HostQueue().mark(), buffer)
            stage.copy_to(buffer).synchronize()
            parts[kind, rank] = [stage.part(index) for index in range(len(layout.spans))]
            if kind is BucketStage:
                assert stage.bytes.numel() == max(sum(run.nbytes for run in bucket) for bucket in mine)
    assert torch.equal(whole[DeviceStage], whole[BucketStage]) and int(whole[BucketStage].sum())
    for kind, buffer in whole.items():
        made = [
            gmac.put_together([parts[kind, rank][index] for rank in range(ranks)], end - start)
            for index, (start, end) in enumerate(layout.spans)
        ]
        assert tuple(made) == digests_of(layout, as_memory(buffer), gmac).buckets


@pytest.mark.parametrize("slow", [1.0, 5.0, 20.0, 50.0, 500.0])
def test_buckets_on_gpus_are_as_large_as_their_deadline_lets_them(slow: float) -> None:
    """Some are under way at once, over what may be the slowest line; each has `stall_s`."""
    config = WeightsConfig(least_mb_s=slow)
    bucket = config.bucket_bytes("cuda")
    assert config.bucket_bytes() == BUCKET_BYTES <= bucket <= 64 << 20
    assert bucket == BUCKET_BYTES or UNDER_WAY * bucket / (slow * 1e6) <= config.stall_s
    assert slow < 50 or bucket == 64 << 20
    assert WeightsConfig(bucket_mb=8).bucket_bytes("cuda") == 8 << 20
