"""The namespace of stored objects: every field separates, and weights are told by their values."""

from dataclasses import fields, replace

import pytest
import torch
from sglang_unified_kv.checkpoint import identity as identity_module
from sglang_unified_kv.checkpoint.identity import Identity, weights_digest

IDENTITY = Identity(
    engine="0.5.23",
    layout="00ff",
    ring_sizes=(128, 8),
    pages=(("deepseek_v4_c4", 4, 65536),),
    model="{}",
    weights="aa",
    ranks=(1, 1),
    bigram=False,
)
CHANGED = dict(
    engine="0.5.24",
    layout="00fe",
    ring_sizes=(256, 8),
    pages=(("deepseek_v4_c4", 4, 32768), ("deepseek_v4_c4_rope", 4, 8192)),
    model='{"x": 1}',
    weights="ab",
    ranks=(2, 2),
    bigram=True,
    rank=1,
)


@pytest.mark.parametrize("name", [f.name for f in fields(Identity)])
def test_every_field_separates(name):
    assert replace(IDENTITY, **{name: CHANGED[name]}).namespace != IDENTITY.namespace


def test_a_format_change_separates(monkeypatch):
    before = IDENTITY.namespace
    monkeypatch.setattr(identity_module, "FORMAT_VERSION", identity_module.FORMAT_VERSION + 1)
    assert IDENTITY.namespace != before


WEIGHTS = {
    "a": torch.arange(3000, dtype=torch.float32).view(30, 100),
    "b": torch.linspace(0, 1, 77).to(torch.bfloat16),
    "scale": torch.tensor(1.0),
    "fp8": torch.linspace(-1, 1, 64).to(torch.float8_e4m3fn),
}


def digest(**changed):
    return weights_digest({**WEIGHTS, **changed}.items())


def test_weights_digest_does_not_depend_on_order_or_run():
    assert digest() == weights_digest(reversed(list(WEIGHTS.items())))


@pytest.mark.parametrize("at", [0, 1, 1024, 2047, 2999])
def test_one_changed_value_changes_the_digest(at):
    changed = WEIGHTS["a"].clone()
    changed.view(-1)[at] += 1e-3
    assert digest(a=changed) != digest()


def test_every_byte_of_an_odd_tail_counts():
    for at in range(70, 77):
        changed = WEIGHTS["b"].clone()
        changed[at] += 0.5
        assert digest(b=changed) != digest()


@pytest.mark.parametrize(
    "changed",
    [
        dict(a=WEIGHTS["a"].view(100, 30)),
        dict(a=WEIGHTS["a"].t()),
        dict(b=WEIGHTS["b"].view(torch.float16)),
        dict(scale=torch.tensor(2.0)),
        dict(more=torch.zeros(1)),
    ],
    ids=["shape", "transposed", "dtype", "scalar", "name"],
)
def test_shape_dtype_and_names_count(changed):
    assert digest(**changed) != digest()


@pytest.mark.parametrize("width", [1024, 4096, 5120, 7168])
def test_rows_that_change_places_change_the_digest(width):
    weight = torch.randn(64, width, generator=torch.manual_seed(0)).to(torch.bfloat16)
    for left, right in ((3, 5), (3, 7), (0, 63), (8, 40)):
        swapped = weight.clone()
        swapped[[left, right]] = weight[[right, left]]
        assert digest(a=swapped) != digest(a=weight)


def test_a_slice_of_a_larger_buffer_has_the_digest_of_its_copy():
    buffer = torch.randn(4097, generator=torch.manual_seed(0)).to(torch.bfloat16)
    assert digest(b=buffer[1:]) == digest(b=buffer[1:].clone())


def test_chunks_of_a_large_weight_do_not_show(monkeypatch):
    weight = torch.randn(100, 4096, generator=torch.manual_seed(0))
    whole = digest(a=weight)
    monkeypatch.setattr(identity_module, "_CHUNK_ROWS", 7)
    assert digest(a=weight) == whole


def test_a_transposed_weight_is_read_where_it_lies(monkeypatch):
    def copied(self, *_):
        raise AssertionError("copied")

    weight = WEIGHTS["a"].t()
    real = torch.Tensor.contiguous
    monkeypatch.setattr(
        torch.Tensor, "contiguous", lambda x, *a: x if x.is_contiguous() else copied(x)
    )
    weights_digest([("a", weight)])
    monkeypatch.setattr(torch.Tensor, "contiguous", real)
