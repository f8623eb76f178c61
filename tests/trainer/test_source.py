"""A version's buckets, as they are cast and hashed on one host."""

from __future__ import annotations

import pytest
import torch

from penstock.protocols.digests import Gmac
from penstock.protocols.versions import digests_of
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.parallel.world import World
from penstock.services.weights.byte_views import as_memory
from penstock.services.weights.layout import view_weights
from penstock.services.weights.sender.shard_exporter import CACHED_BYTES, ShardExporter

GMAC = Gmac.of_run("test")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_digests_taken_while_writing_are_those_of_what_was_written(dtype: str) -> None:
    """Weights beyond a bucket's end, beyond what is hashed at a time, and with padding between them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"odd": (3, 5), "large": (CACHED_BYTES // 2 + 7,), "one": (1,), "larger": (3, CACHED_BYTES // 2 + 1)}
    named = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    source = ShardExporter(named, dtype, 3 * CACHED_BYTES, World(torch.device("cpu")), GMAC)
    for _ in range(2):
        buffer = torch.zeros(source.layout.nbytes, dtype=torch.uint8)
        found = tuple(digest for _, digest in source.buckets(buffer, hashed=True))
        assert len(found) > 1
        assert found == digests_of(source.layout, as_memory(buffer), GMAC).buckets
        for name, weight in view_weights(source.layout, buffer).items():
            assert torch.equal(weight, named[name].to(DTYPES[dtype]))
        for weight in named.values():
            weight.mul_(1.5)
