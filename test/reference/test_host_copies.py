"""The copies of HiCache's ``kernel`` io backend, by address, against plain indexing; sgl_kernel's."""

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sglang_unified_kv.reference import upstream_kernels
from sglang_unified_kv.reference.edits.hicache import COPIES
from sglang_unified_kv.reference.ops import host_copies

LAYERS, ROWS, ITEM = 3, 20, 24
DEVICE_ROWS, HOST_ROWS = torch.tensor([3, 19, 7]), torch.tensor([0, 5, 2])


@pytest.fixture
def layers():
    """A device's layers, of another shape and dtype than the host's rows of bytes."""
    return [torch.randint(0, 99, (ROWS, ITEM // 8), dtype=torch.int64) for _ in range(LAYERS)]


def table(tensors):
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


def as_rows(tensor):
    return tensor.view(torch.uint8).view(-1, ITEM)


def empty_layers():
    return [torch.zeros(6, ITEM, dtype=torch.uint8) for _ in range(LAYERS)]


def untouched(rows, copied):
    return not rows[[i for i in range(len(rows)) if i not in copied.tolist()]].any()


def test_layers_to_layers_and_back(layers):
    host = empty_layers()
    host_copies.kernel_copy_layers(table(layers), table(host), DEVICE_ROWS, HOST_ROWS, ITEM, LAYERS)
    for device, rows in zip(layers, host, strict=True):
        assert torch.equal(rows[HOST_ROWS], as_rows(device)[DEVICE_ROWS])
        assert untouched(rows, HOST_ROWS)
        back = torch.zeros_like(device)
        host_copies.kernel_copy_layer(rows, back, HOST_ROWS, DEVICE_ROWS, ITEM)
        assert torch.equal(back[DEVICE_ROWS], device[DEVICE_ROWS])
        assert untouched(back, DEVICE_ROWS)


def test_layers_to_pages_and_back(layers):
    pages = torch.zeros(6, LAYERS, ITEM, dtype=torch.uint8)
    page = LAYERS * ITEM
    host_copies.kernel_layers_to_pages(
        table(layers), pages, DEVICE_ROWS, HOST_ROWS, ITEM, page, LAYERS
    )
    assert untouched(pages, HOST_ROWS)
    for layer, device in enumerate(layers):
        assert torch.equal(pages[HOST_ROWS, layer], as_rows(device)[DEVICE_ROWS])
        back = torch.zeros_like(device)
        host_copies.kernel_pages_to_layer(pages, back, HOST_ROWS, DEVICE_ROWS, layer, ITEM, page)
        assert torch.equal(back[DEVICE_ROWS], device[DEVICE_ROWS])
        assert untouched(back, DEVICE_ROWS)


def test_a_negative_index_on_either_side_is_skipped(layers):
    (host, *_) = empty_layers()
    host_copies.kernel_copy_layer(
        layers[0], host, torch.tensor([-1, 3, 4]), torch.tensor([0, 1, -1]), ITEM
    )
    assert torch.equal(host[1], as_rows(layers[0])[3]) and untouched(host, torch.tensor([1]))
    host_copies.kernel_copy_layer(layers[0], host, torch.tensor([-1]), torch.tensor([0]), ITEM)
    assert untouched(host, torch.tensor([1]))


@pytest.mark.parametrize(
    ("rows", "places", "item", "error", "says"),
    [
        ([1], [1], 20, ValueError, "rows of 20 bytes"),
        ([1, 2], [1], ITEM, ValueError, "2 rows to 1 places"),
    ],
)
def test_what_the_kernels_refuse(layers, rows, places, item, error, says):
    with pytest.raises(error, match=says):
        host_copies.kernel_copy_layer(
            layers[0], empty_layers()[0], torch.tensor(rows), torch.tensor(places), item
        )


def test_other_index_types_and_layer_counts_are_refused(layers):
    (host, *_) = empty_layers()
    short = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(TypeError, match="torch.int32"):
        host_copies.kernel_copy_layer(layers[0], host, short, short, ITEM)
    with pytest.raises(ValueError, match="a table of 3 layers: num_layers is 2"):
        host_copies.kernel_copy_layers(
            table(layers), table(layers), DEVICE_ROWS, HOST_ROWS, ITEM, 2
        )


def test_addresses_of_another_device_are_refused(layers):
    elsewhere = torch.empty(4, ITEM, device="meta")
    with pytest.raises(NotImplementedError, match="on a GPU use direct, or"):
        host_copies.kernel_copy_layer(layers[0], elsewhere, HOST_ROWS, HOST_ROWS, ITEM)


def parameters_of_sgl_kernel():
    """The parameters of its copies, by name; the package itself does not load without a GPU."""
    spec = importlib.util.find_spec("sgl_kernel")
    if spec is None or spec.origin is None:
        pytest.skip("sgl_kernel is not installed")
    source = Path(spec.origin).with_name("kvcacheio.py").read_text()
    return {
        node.name: [arg.arg for arg in node.args.args]
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }


def test_the_copies_have_the_parameters_of_sgl_kernels():
    theirs = parameters_of_sgl_kernel()
    for name, copy in COPIES.items():
        tuning = ["block_quota", "num_warps_per_block"]
        assert [*inspect.signature(copy).parameters] == [p for p in theirs[name] if p not in tuning]


def test_sgl_kernels_copies_run_while_they_are_chosen(make_engine, monkeypatch, layers):
    from sglang.srt.mem_cache import memory_pool_host

    package, called = ModuleType("sgl_kernel"), []
    calls = {name: lambda *args, name=name, **kwargs: called.append(name) for name in COPIES}
    package.kvcacheio = SimpleNamespace(**calls)
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    with upstream_kernels.also(upstream_kernels.SGL_KERNEL):
        for name in COPIES:
            getattr(memory_pool_host, name)()
    assert called == list(COPIES)
    (host, *_) = empty_layers()
    memory_pool_host.transfer_kv_direct(layers[:1], [host], DEVICE_ROWS, HOST_ROWS, 1)
    assert torch.equal(host[HOST_ROWS], as_rows(layers[0])[DEVICE_ROWS])
