"""Construction of upstream's DeepSeek-V4 model off ROCm."""

from __future__ import annotations

from sglang_unified_kv.reference.edits.series import FEATURE, SERIES
from sglang_unified_kv.reference.ops import arithmetic, experts
from sglang_unified_kv.reference.ops.invariant_torch import InvariantTorch

_MODEL = "sglang.srt.models.deepseek_v4"


@SERIES.replace(
    f"{_MODEL}:get_rope_wrapper",
    feature=FEATURE,
    why="the CPU factory refuses layers without rope scaling; this path reads freqs_cis, not it",
    params=(
        "head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, "
        "partial_rotary_factor, device"
    ),
    fingerprint="7847ad6513120093",
)
def no_rotary_module(*args, **kwargs) -> None:
    return None


@SERIES.wrap(
    f"{_MODEL}:MQALayer.__init__",
    feature=FEATURE,
    why=(
        "the fused decode store reads cos/sin tables that upstream registers on ROCm only; float32 "
        "here, so that decode and prefill rotate alike"
    ),
    params="self, config, layer_id, quant_config, prefix, alt_streams, compress_ratio_override",
    fingerprint="a5edfe20e649ff9f",
)
def register_rope_tables(original, self, *args, **kwargs) -> None:
    original(self, *args, **kwargs)
    for name, table in (("cos_cache", self.freqs_cis.real), ("sin_cache", self.freqs_cis.imag)):
        self.register_buffer(name, table.contiguous()[:, None, None], persistent=False)


@SERIES.replace(
    "sglang.srt.configs.update_config:adjust_config_with_unaligned_cpu_tp",
    feature=FEATURE,
    why="with tp > 1 on a CPU it rewrites head counts that the model then asserts against",
    params="model_config, load_config, tp_size",
    fingerprint="fcbd518636d151c3",
)
def keep_model_config(model_config, load_config, tp_size):
    return model_config


@SERIES.wrap(
    f"{_MODEL}:DeepseekV4ForCausalLM.forward",
    feature=FEATURE,
    why="the model's own torch calls round by the number of rows; here they must not",
    params="self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors",
    fingerprint="c22acdf100921879",
)
def forward_with_invariant_torch(original, *args, **kwargs):
    if not arithmetic.chunk_invariant():
        return original(*args, **kwargs)
    with InvariantTorch():
        return original(*args, **kwargs)


@SERIES.wrap(
    "sglang.srt.layers.moe.fused_moe_native:moe_forward_native",
    feature=FEATURE,
    why="it waits for the device to learn who was chosen, which a CUDA graph cannot",
    params="layer, x, topk_output, moe_runner_config",
    fingerprint="53b7e13072dbf344",
)
def experts_in_graphs(original, layer, x, topk_output, moe_runner_config):
    import torch

    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return (experts.every_expert if capturing else original)(
        layer, x, topk_output, moe_runner_config
    )
