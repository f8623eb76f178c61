"""What proves a bucket: AES-GMAC (NIST SP 800-38D, GCM without a message), under a key of the run's own.

Who does not have the key changes a bucket without being noticed with a probability of at most 2^-100 for buckets of up
to 1 GiB (a bucket of n blocks of 16 bytes: (n + 1) / 2^128). That holds for as long as he sees no digest: they travel
under CURVE, apart from the bytes. One nonce for all buckets is enough then, and the same bytes have the same digest.

GMAC is linear: over two buffers that are zero where the other is not, the sums of blocks times powers of H add up. So
ranks hash their own rows, wherever those lie, and the digest of the bucket is put together from what they found
(`Gmac.put_together`). On a CPU the processor's own instructions do it; `services.weights.gpu_digest` has it for GPUs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from typing import Protocol

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

BLOCK = 16
DIGEST_BYTES = 16
_NONCE = b"penstock-mac"
_R = 0xE1 << 120
"""x^128 in GF(2^128) as GCM writes it: the first bit is the coefficient of x^0."""
_TOP = 1 << 127


def multiply(one: int, other: int) -> int:
    """The product in GCM's field, of blocks as big-endian numbers (SP 800-38D, algorithm 1)."""
    product = 0
    for bit in range(127, -1, -1):
        if other >> bit & 1:
            product ^= one
        one = one >> 1 ^ (_R if one & 1 else 0)
    return product


class Hasher(Protocol):
    """The digest of a bucket that is given in parts, in their order."""

    def update(self, data: object) -> None:
        """The next part."""

    def hexdigest(self) -> str:
        """Ends it."""


class Gmac:
    """Digests under ``key``, 16 bytes, each as 32 hexadecimal digits."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._mac = AESGCM(key)
        encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        self.h = int.from_bytes(encryptor.update(bytes(BLOCK)))
        self._pad = int.from_bytes(encryptor.update(_NONCE + b"\0\0\0\1"))
        self.power = cache(self._power)
        """H to a power, as a number."""

    @classmethod
    def of_run(cls, run_key: str) -> Gmac:
        """Under a key that is made of the run's own."""
        return cls(hashlib.blake2b(run_key.encode(), digest_size=BLOCK, person=b"penstock-digest").digest())

    def bucket(self, data: object) -> str:
        """Of the bytes of a buffer."""
        return self._mac.encrypt(_NONCE, b"", memoryview(data).cast("B")).hex()  # type: ignore[arg-type]

    def hasher(self) -> Hasher:
        """`bucket`, in parts."""
        return _Hasher(self.key)

    def whole(self, layout: str, buckets: Iterable[str]) -> str:
        """Of a version: of its layout's digest and all buckets'."""
        text = "".join([layout, *buckets]).encode()
        return hashlib.blake2b(text, key=self.key, digest_size=DIGEST_BYTES).hexdigest()

    # --- parts of a bucket -------------------------------------------------------------------------------------------

    def part(self, data: object, after: int) -> int:
        """What ``data`` adds to the sum of its bucket, where it begins and ends with a block of that, and ``after``
        blocks follow it. Zero where there is no data: so are all bytes that nobody adds."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        blocks = len(view) // BLOCK
        assert blocks * BLOCK == len(view)
        mine = int(self.bucket(view), 16) ^ self._pad ^ multiply(self._length(len(view)), self.h)
        return multiply(mine, self.power(after))

    def lift(self, polynomial: int, after: int) -> int:
        """`part` of blocks whose value as a polynomial in H, the last block's power being 0, is known already."""
        return multiply(polynomial, self.power(after + 2))

    def put_together(self, parts: Iterable[int], nbytes: int) -> str:
        """The digest of a bucket of ``nbytes`` whose bytes are covered by ``parts``, each once."""
        total = self._pad ^ multiply(self._length(nbytes), self.h)
        for part in parts:
            total ^= part
        return total.to_bytes(DIGEST_BYTES).hex()

    def _power(self, exponent: int) -> int:
        result, square = _TOP, self.h
        while exponent:
            if exponent & 1:
                result = multiply(result, square)
            square = multiply(square, square)
            exponent >>= 1
        return result

    @staticmethod
    def _length(nbytes: int) -> int:
        return nbytes * 8 << 64


class _Hasher:
    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES(key), modes.GCM(_NONCE)).encryptor()

    def update(self, data: object) -> None:
        self._encryptor.authenticate_additional_data(memoryview(data).cast("B"))  # type: ignore[arg-type]

    def hexdigest(self) -> str:
        self._encryptor.finalize()
        return self._encryptor.tag.hex()
