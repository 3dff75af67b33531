"""What SGLang would ask of a user who starts a server on the CPU."""

from __future__ import annotations

import os

from sglang_unified_kv.reference.edits.series import FEATURE, SERIES

_CORES = "SGLANG_CPU_OMP_THREADS_BIND"


@SERIES.wrap(
    "sglang.srt.arg_groups.cuda_graph_hook:handle_cuda_graph_config",
    feature=FEATURE,
    why="on the CPU there are neither graphs nor a custom all-reduce; the draft worker looks for both",
    params="server_args",
    fingerprint="1fd5d159cbabb888",
)
def no_graphs_on_cpu(original, server_args) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    on_cpu = resolving_view(server_args).device == "cpu"
    if on_cpu:
        declare_resolution(
            server_args, FEATURE, disable_cuda_graph=True, disable_custom_all_reduce=True
        )
    original(server_args)
    config = resolving_view(server_args).cuda_graph_config
    for phase in ("decode", "prefill") if on_cpu else ():
        backend = getattr(config, phase).backend
        if backend != "disabled":
            raise ValueError(
                f"--cuda-graph-backend-{phase} {backend}: the reference engine has no CUDA graphs on "
                "the CPU; leave it out or set it to disabled"
            )


@SERIES.wrap(
    "sglang.srt.utils.numa_utils:init_threads_binding",
    feature=FEATURE,
    why=f"it refuses more ranks than NUMA nodes unless {_CORES} names their cores",
    params="*, numa_index, world_size",
    fingerprint="907397afc037cbed",
)
def cores_of_rank(original, *, numa_index: int, world_size: int):
    if world_size == 1 or os.environ.get(_CORES):
        return original(numa_index=numa_index, world_size=world_size)
    cores = sorted(os.sched_getaffinity(0))
    return str(cores[numa_index % len(cores)])
