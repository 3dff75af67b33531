"""The sealed record: what verifies, and the reason given when it does not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_unified_kv.checkpoint import record_format
from sglang_unified_kv.checkpoint.record_format import (
    HEADER_BYTES,
    TRAILER_BYTES,
    RecordFormat,
    page_trailer,
)

PAYLOAD = 8192
KEY, OTHER_KEY = "ab" * 32, "cd" * 32
FORMAT = RecordFormat(b"n" * 16, b"f" * 32, PAYLOAD)


def sealed(record=FORMAT, key=KEY, boundary=512):
    slot = np.random.default_rng(0).integers(0, 256, HEADER_BYTES + PAYLOAD, np.uint8)
    record.seal(slot, key, boundary)
    return slot


def test_a_sealed_record_verifies():
    assert FORMAT.verify(sealed(), KEY, 512) is None


@pytest.mark.parametrize(
    "reader, reason",
    [
        (RecordFormat(b"m" * 16, b"f" * 32, PAYLOAD), "namespace"),
        (RecordFormat(b"n" * 16, b"g" * 32, PAYLOAD), "layout"),
        (RecordFormat(b"n" * 16, b"f" * 32, PAYLOAD - 8), "payload length"),
    ],
)
def test_another_reader_says_what_differs(reader, reason):
    assert reader.verify(sealed(), KEY, 512) == reason


def test_another_prefix_or_boundary_is_told():
    assert FORMAT.verify(sealed(), OTHER_KEY, 512) == "prefix hash"
    assert FORMAT.verify(sealed(), KEY, 768) == "boundary"


def test_an_older_format_is_told_from_damage(monkeypatch):
    slot = sealed()
    monkeypatch.setattr(record_format, "FORMAT_VERSION", record_format.FORMAT_VERSION + 1)
    assert FORMAT.verify(slot, KEY, 512) == "format version"


@given(st.integers(0, HEADER_BYTES + PAYLOAD - 1), st.integers(1, 255))
def test_any_changed_byte_that_is_read_is_noticed(at, change):
    slot = sealed()
    slot[at] ^= change
    padding = record_format._FIELDS.size + 16 <= at < HEADER_BYTES
    assert (FORMAT.verify(slot, KEY, 512) is None) == padding


@given(st.integers(0, HEADER_BYTES + PAYLOAD - 1))
def test_a_record_cut_short_over_older_bytes_is_noticed(length):
    slot = sealed(key=OTHER_KEY)
    rest = np.full_like(slot, 7)
    rest[:length] = slot[:length]
    assert FORMAT.verify(rest, OTHER_KEY, 512) is not None


def test_an_erased_slot_holds_no_record():
    slot = sealed()
    FORMAT.erase(slot)
    assert FORMAT.verify(slot, KEY, 512) == "magic"


@pytest.mark.parametrize(
    "changed",
    [
        dict(namespace=b"m" * 16),
        dict(pool="c128"),
        dict(key=OTHER_KEY),
        dict(page=np.arange(64, dtype=np.uint8)[::-1].copy()),
    ],
    ids=lambda d: next(iter(d)),
)
def test_a_page_trailer_covers_namespace_pool_key_and_bytes(changed):
    page = dict(namespace=b"n" * 16, pool="c4", key=KEY, page=np.arange(64, dtype=np.uint8))
    assert len(page_trailer(**page)) == TRAILER_BYTES
    assert page_trailer(**page) != page_trailer(**{**page, **changed})
