"""What a record looks like outside the process that captured it.

A host slot is one header block and one payload, contiguous, so that a storage backend moves both as one
object and an object never half-belongs to another. The header is written when the record is saved and
checked when it is fetched; between the two the block means nothing.

Header block, little endian, :data:`HEADER_BYTES` bytes, zero behind the fields::

    offset  bytes  field
         0      8  magic, b"SGUKVCKP"
         8      4  format version
        12      4  bytes of this block
        16     16  namespace (identity.py: model, weights, engine, page layout)
        32     32  layout fingerprint (layout.py)
        64     32  prefix hash, the page hash of the page that ends at the boundary
        96      8  boundary, tokens
       104      8  payload length, bytes
       112     16  xxh3-128 over the fields above and the payload
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from .layout import FORMAT_VERSION

MAGIC = b"SGUKVCKP"
HEADER_BYTES = 4096
"""One memory page, so that the payload behind it stays aligned for device copies and direct I/O."""

_FIELDS = struct.Struct("<8sII16s32s32sQQ")
_CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class RecordFormat:
    """Seals and verifies records of one namespace and layout.

    Attributes:
        namespace: 16 bytes.
        fingerprint: the layout's, 32 bytes.
        payload_bytes: bytes of a record, a whole number of alignment units.
    """

    namespace: bytes
    fingerprint: bytes
    payload_bytes: int

    def seal(self, slot: np.ndarray, key: str, boundary: int) -> None:
        """Write the header of the record in ``slot``, uint8 ``[HEADER_BYTES + payload_bytes]``."""
        fields = self._fields(key, boundary)
        slot[:HEADER_BYTES] = 0
        slot[: _FIELDS.size] = np.frombuffer(fields, np.uint8)
        checksum = self._checksum(fields, slot)
        slot[_FIELDS.size : _FIELDS.size + _CHECKSUM_BYTES] = np.frombuffer(checksum, np.uint8)

    def verify(self, slot: np.ndarray, key: str, boundary: int) -> str | None:
        """Why ``slot`` does not hold the record of ``key`` at ``boundary``; None if it does.

        The first field that differs gives the reason: an older format or another layout is told from
        damage.
        """
        found = slot[: _FIELDS.size].tobytes()
        expected = self._fields(key, boundary)
        if found != expected:
            names = (
                "magic",
                "format version",
                "header length",
                "namespace",
                "layout",
                "prefix hash",
                "boundary",
                "payload length",
            )
            for name, left, right in zip(
                names, _FIELDS.unpack(found), _FIELDS.unpack(expected), strict=True
            ):
                if left != right:
                    return name
        checksum = slot[_FIELDS.size : _FIELDS.size + _CHECKSUM_BYTES].tobytes()
        return None if checksum == self._checksum(expected, slot) else "checksum"

    @staticmethod
    def erase(slot: np.ndarray) -> None:
        """Make ``slot`` hold no record, so that a fetch that wrote nothing cannot verify."""
        slot[: _FIELDS.size] = 0

    def _fields(self, key: str, boundary: int) -> bytes:
        return _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            HEADER_BYTES,
            self.namespace,
            self.fingerprint,
            bytes.fromhex(key),
            boundary,
            self.payload_bytes,
        )

    @staticmethod
    def _checksum(fields: bytes, slot: np.ndarray) -> bytes:
        digest = xxhash.xxh3_128(fields)
        digest.update(slot[HEADER_BYTES:].data)
        return digest.digest()


TRAILER_BYTES = 16


def page_trailer(namespace: bytes, pool: str, key: str, page: np.ndarray) -> bytes:
    """xxh3-128 that ties a page's bytes to its pool, its key and the namespace.

    SGLang's page objects are raw bytes; appended to them, this tells a page that is damaged, cut short
    or filed under another page's key from a good one.

    Args:
        page: uint8 ``[bytes]``.
    """
    digest = xxhash.xxh3_128(namespace)
    digest.update(f"{pool}\0{key}\0".encode())
    digest.update(page.data)
    return digest.digest()
