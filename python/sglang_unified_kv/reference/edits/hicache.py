"""HiCache's host pools and copies, which upstream has with pinned memory and sgl_kernel only."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from sglang_unified_kv.reference.edits.series import FEATURE, SERIES
from sglang_unified_kv.reference.ops import host_copies
from sglang_unified_kv.reference.upstream_kernels import SGL_KERNEL, either

_POOLS = "sglang.srt.mem_cache.memory_pool_host"


@SERIES.wrap(
    f"{_POOLS}:DeepSeekV4PagedHostPool.__init__",
    feature=FEATURE,
    why="host memory is pinned through a CUDA or HIP runtime, which a pool of CPU tensors has not",
    params=(
        "self, pool_name, device_buffers, item_bytes, num_host_pages, slot_page_size, layout, "
        "device, pin_memory, allocator_type, page_aligned_only"
    ),
    fingerprint="7e87863f1a060761",
)
def unpinned_beside_cpu_buffers(original, *args, **kwargs) -> None:
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    if all(buffer.device.type == "cpu" for buffer in arguments["device_buffers"]):
        arguments["pin_memory"] = False
    original(**arguments)


def _copy(name: str, reference: Callable[..., None]) -> Callable[..., None]:
    def upstreams(*args: Any, **kwargs: Any) -> None:
        from sgl_kernel import kvcacheio

        getattr(kvcacheio, name)(*args, **kwargs)

    return functools.wraps(reference)(functools.partial(either(SGL_KERNEL, reference), upstreams))


COPIES: dict[str, Callable[..., None]] = {
    "transfer_kv_direct": host_copies.copy_layers,
    "transfer_kv_all_layer_direct_lf_pf": host_copies.layers_to_pages,
    "transfer_kv_per_layer_direct_pf_lf": host_copies.pages_to_layer,
    "transfer_kv_all_layer_mla": host_copies.kernel_copy_layers,
    "transfer_kv_per_layer_mla": host_copies.kernel_copy_layer,
    "transfer_kv_all_layer_mla_lf_pf": host_copies.kernel_layers_to_pages,
    "transfer_kv_per_layer_mla_pf_lf": host_copies.kernel_pages_to_layer,
}
"""The calls of sgl_kernel's kvcacheio that the host pools make, and ours."""

for _name, _reference in COPIES.items():
    SERIES.member(
        f"{_POOLS}:{_name}",
        feature=FEATURE,
        why="off CUDA and ROCm the module does not have the name that its copies call",
    )(_copy(_name, _reference))
