"""Several ranks on the CPU, or on NVIDIA GPUs."""

from __future__ import annotations

from sglang_unified_kv.reference.edits.series import FEATURE, SERIES


@SERIES.wrap(
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.prepare_mlp_sync_batch",
    feature=FEATURE,
    why="with DP attention it pins a tensor unless SGLang's own CPU engine is on, which is another one",
    params="self, model_runner",
    fingerprint="ec41c6440f6cdec8",
)
def prepare_without_pinned_memory(original, *args, **kwargs):
    from unittest import mock

    import torch

    tensor = torch.tensor

    def pageable(*values, pin_memory=False, **options):
        return tensor(*values, **options)

    with mock.patch.object(torch, "tensor", pageable):
        return original(*args, **kwargs)


@SERIES.replace(
    "sglang.srt.layers.dp_attention:memcpy",
    feature=FEATURE,
    why="Triton, unless SGLang's own CPU engine is on, which has this one",
    params="dst, src, dim, offset, sz, offset_src",
    fingerprint="0bf497c3c4c467d0",
)
def memcpy(dst, src, dim, offset, sz, offset_src):
    from sglang.srt.layers.dp_attention import memcpy_cpu

    memcpy_cpu(dst, src, dim, int(offset), int(sz), offset_src)


@SERIES.wrap(
    "sglang.srt.distributed.parallel_state:_group_coordinator_device",
    feature=FEATURE,
    why="the CPU wherever SGLang sees no CUDA, as for an engine on a GPU (device.py)",
    params="local_rank",
    fingerprint="c818f168474cced2",
)
def device_of_the_engine(original, local_rank):
    import torch

    from sglang_unified_kv.reference.device import asked

    if asked() == "cuda":
        return torch.device("cuda", local_rank)
    return original(local_rank)


@SERIES.replace(
    "sglang.srt.distributed.device_communicators.pynccl:PyNcclCommunicator.__init__",
    feature=FEATURE,
    why="it loads the NCCL that torch brings, which then finds no GPU, or one for all ranks",
    params="self, group, device, library_path, is_symmetric_memory_enabled, cta_policy",
    fingerprint="4fa0c6af9b5be125",
)
def without_nccl(self, group, device, *args, **kwargs) -> None:
    self.available, self.disabled = False, True


@SERIES.wrap(
    "sglang.srt.distributed.parallel_state:GroupCoordinator.all_reduce",
    feature=FEATURE,
    why="Gloo sums more than two ranks in an order that depends on the tensor's size: a token's bits would "
    "depend on who else is in the batch",
    params="self, input_",
    fingerprint="8d4026274e64a92c",
)
def all_reduce_in_rank_order(original, self, input_):
    if self.world_size <= 2 or not input_.is_cpu:
        return original(self, input_)
    return input_.copy_(_sum_of_ranks(input_, self.device_group, self.world_size))


@SERIES.wrap(
    "sglang.srt.distributed.parallel_state:GroupCoordinator._reduce_scatter_tensor",
    feature=FEATURE,
    why="as all_reduce",
    params="self, output, input",
    fingerprint="55d4ceecd4b7cf81",
)
def reduce_scatter_in_rank_order(original, self, output, input):
    if self.world_size <= 2 or not input.is_cpu:
        return original(self, output, input)
    whole = _sum_of_ranks(input, self.device_group, self.world_size)
    return output.copy_(whole.chunk(self.world_size)[self.rank_in_group])


def _sum_of_ranks(tensor, group, ranks: int):
    """The sum, from the first rank to the last."""
    import torch

    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(ranks)]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


def _on_cpu(method: str):
    """A collective that calls ``method`` of the group that is its last argument."""

    def collective(*tensors, group_name):
        from sglang.srt.distributed import parallel_state

        getattr(parallel_state._groups[group_name](), method)(*tensors)

    return collective


for _name, _params, _fingerprint, _method in (
    ("inplace_all_reduce", "tensor, group_name", "8d4aaba6d8cdcec5", "_all_reduce_in_place"),
    (
        "reg_all_gather_into_tensor",
        "output, input, group_name",
        "8f7f6842937f4167",
        "_all_gather_into_tensor",
    ),
    (
        "reg_reduce_scatter_tensor",
        "output, input, group_name",
        "693843b2fcc796e7",
        "_reduce_scatter_tensor",
    ),
):
    SERIES.replace(
        f"sglang.srt.distributed.parallel_state:{_name}",
        feature=FEATURE,
        why="a custom op, registered with torch for the platform's device alone",
        params=_params,
        fingerprint=_fingerprint,
    )(_on_cpu(_method))
