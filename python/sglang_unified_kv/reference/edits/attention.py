"""The unified_kv gate and the attention backend, which upstream opens on ROCm only."""

from __future__ import annotations

from sglang_unified_kv.reference.edits.series import FEATURE, SERIES

_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend_hip_radix"
_DRAFT = "sglang.srt.speculative.draft_utils:DraftBackendFactory"
_BY_PLATFORM = "upstream's factory picks the HIP backend by platform"


@SERIES.replace(
    "sglang.srt.layers.attention.dsv4.unified_kv_gate:is_unified_kv_triton",
    feature=FEATURE,
    why="upstream's gate also asks for ROCm; here the variable alone decides",
    params="",
    fingerprint="3994741756f7933c",
)
def is_unified_kv_triton() -> bool:
    from sglang.srt.environ import envs

    return envs.SGLANG_HACK_FLASHMLA_BACKEND.get() == "unified_kv_triton"


@SERIES.registry(
    "sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS[dsv4]",
    feature=FEATURE,
    why=_BY_PLATFORM,
    params="runner",
    fingerprint="f1b50b3afde7de8c",
)
def create_hip_radix_backend(runner):
    from sglang.srt.layers.attention.deepseek_v4_backend_hip_radix import (
        DeepseekV4HipRadixBackend,
    )

    return DeepseekV4HipRadixBackend(runner)


@SERIES.replace(
    f"{_DRAFT}._create_dsv4_decode_backend",
    feature=FEATURE,
    why=_BY_PLATFORM,
    params="self",
    fingerprint="959cf14a8e6e5cc4",
)
def create_draft_decode_backend(self):
    from sglang.srt.layers.attention.deepseek_v4_backend_hip_radix import DeepseekV4MultiStepBackend

    steps = self.speculative_num_steps
    return "dsv4", DeepseekV4MultiStepBackend(self.draft_model_runner, self.topk, steps)


@SERIES.replace(
    f"{_DRAFT}._create_dsv4_prefill_backend",
    feature=FEATURE,
    why=_BY_PLATFORM,
    params="self",
    fingerprint="09b07e6e12625480",
)
def create_draft_extend_backend(self):
    from sglang.srt.layers.attention.deepseek_v4_backend_hip_radix import DeepseekV4HipRadixBackend

    return "dsv4", DeepseekV4HipRadixBackend(self.draft_model_runner, skip_prefill=False)


@SERIES.replace(
    f"{_BACKEND}:DeepseekV4HipRadixBackend._move_to_device",
    feature=FEATURE,
    why="upstream pins the staging tensor, which a CPU build of torch cannot",
    params="self, x",
    fingerprint="8eb4b7ea13e24720",
)
def move_to_device(self, x: list[int]):
    import torch

    return torch.tensor(x, dtype=torch.int32, device=self.device)


@SERIES.replace(
    f"{_BACKEND}:_create_flashmla_metadata",
    feature=FEATURE,
    why="off ROCm upstream imports flash_mla for metadata that the unified_kv path never reads",
    params="",
    fingerprint="72c638e954e123be",
)
def create_flashmla_metadata() -> None:
    return None
