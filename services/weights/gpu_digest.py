"""`protocols.digests` where the bytes are: on a GPU.

GMAC's sum of blocks times powers of H is linear over bits: 16 blocks at once, it is one product with a matrix of 2,048
by 128 bits, counted in int8 on tensor cores and taken modulo 2; the results are blocks again, whose H is the old one to
the 16th power. A few rounds leave one block. The numbers are those of the processor's own instructions.
"""

from __future__ import annotations

from functools import lru_cache

import structlog
import torch

from penstock.protocols.digests import BLOCK, Gmac, multiply

log = structlog.get_logger()

TOGETHER = 16
"""Blocks of one product."""
CHUNK_BYTES = 8 << 20
"""Of the bucket at once: their bits take eight times as much memory."""
_ROWS = 32
"""cuBLAS multiplies int8 in multiples of it, and with the second matrix by columns alone (pytorch#169956)."""


class GpuGmac:
    """Digests under the key of ``gmac``, of buffers on ``device``."""

    def __init__(self, gmac: Gmac, device: torch.device) -> None:
        self._gmac, self._device = gmac, device
        self._matrices: dict[int, torch.Tensor] = {}
        self._int8 = True
        """As long as the GPU does not refuse it."""
        bits = torch.arange(8, dtype=torch.uint8)
        self._bits = (torch.arange(256, dtype=torch.uint8)[:, None] >> bits & 1).to(torch.int8).to(device)
        """int8 ``[256, 8]``: the bits of every byte."""

    def bucket(self, data: torch.Tensor) -> str:
        """Of uint8 ``[bytes]``."""
        return self._gmac.put_together([self.part(data, 0)] if data.numel() else [], data.numel())

    def part(self, data: torch.Tensor, after: int) -> int:
        """`Gmac.part` of uint8 ``[bytes]``; a last block that is not full counts as if zeros followed."""
        if lacking := -data.numel() % BLOCK:
            data = torch.cat((data, data.new_zeros(lacking)))
        rows, level = self._fold_bytes(data.view(-1, BLOCK)), 1
        while len(rows) > 1:
            rows = self._fold(_grouped(rows), level)
            level += 1
        found = rows[0].to("cpu", torch.uint8)
        value = int.from_bytes(bytes(_bytes_of(found)))
        return self._gmac.lift(value, after)

    def _fold_bytes(self, blocks: torch.Tensor) -> torch.Tensor:
        """The first round, from bytes: uint8 ``[blocks, 16]`` to bits, int8 ``[blocks / 16, 128]``."""
        first = len(blocks) % TOGETHER
        folded = []
        if first:
            padded = torch.cat((blocks.new_zeros((TOGETHER - first, BLOCK)), blocks[:first]))
            folded.append(self._fold(self._spread(padded).view(1, -1), 0))
        body = blocks[first:]
        step = CHUNK_BYTES // BLOCK
        for start in range(0, len(body), step):
            folded.append(self._fold(self._spread(body[start : start + step]).view(-1, TOGETHER * 128), 0))
        return torch.cat(folded)

    def _spread(self, blocks: torch.Tensor) -> torch.Tensor:
        return self._bits[blocks.flatten().int()]

    def _fold(self, rows: torch.Tensor, level: int) -> torch.Tensor:
        """Bits, int8 ``[rows, 2048]`` to ``[rows, 128]``: 16 blocks each to one."""
        matrix = self._matrix(level)
        found = self._on_tensor_cores(rows, matrix) if rows.is_cuda else (rows.float() @ matrix.t().float()).int()
        return (found & 1).to(torch.int8)  # both are exact: whole numbers, of at most 2048

    def _on_tensor_cores(self, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        if self._int8:
            missing = -len(rows) % _ROWS
            padded = torch.cat((rows, rows.new_zeros((missing, rows.shape[1])))) if missing else rows
            try:
                return torch._int_mm(padded, matrix.t())[: len(rows)]
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                log.warning("no int8 products on this GPU: digests take twice as long", error=str(error)[:200])
                self._int8 = False
        return (rows.half() @ matrix.t().half()).int()  # 16 bits hold whole numbers up to 2048

    def _matrix(self, level: int) -> torch.Tensor:
        """int8 ``[128, 2048]``: what each bit of 16 blocks adds to each of one, the last block's power being 0. Bit j
        of byte i stands at ``8 i + j``."""
        if level not in self._matrices:
            self._matrices[level] = _table(self._gmac.power(TOGETHER**level)).to(self._device)
        return self._matrices[level]


@lru_cache(maxsize=32)
def _table(base: int) -> torch.Tensor:
    """The matrix for powers of ``base``, on the host. It takes 0.1 s, and every version asks for the same few."""
    factor, images = 1 << 127, []
    for _ in range(TOGETHER):
        images.append([multiply(factor, _unit(place)) for place in range(128)])
        factor = multiply(factor, base)
    words = b"".join(image.to_bytes(BLOCK) for block in reversed(images) for image in block)
    table = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    spread = (table[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).to(torch.int8)
    return spread.view(-1, 128).t().contiguous()


def _grouped(rows: torch.Tensor) -> torch.Tensor:
    """Blocks as bits, int8 ``[blocks, 128]``, 16 to a row; zeros before the first change nothing."""
    lacking = -len(rows) % TOGETHER
    if lacking:
        rows = torch.cat((rows.new_zeros((lacking, rows.shape[1])), rows))
    return rows.view(-1, TOGETHER * 128)


def _unit(place: int) -> int:
    """The block whose only bit is bit ``place % 8`` of byte ``place // 8``."""
    return 1 << (8 * (BLOCK - 1 - place // 8) + place % 8)


def _bytes_of(bits: torch.Tensor) -> list[int]:
    return (bits.view(BLOCK, 8) << torch.arange(8, dtype=torch.uint8)).sum(1).tolist()
