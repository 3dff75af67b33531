"""The routed experts without a look at who was chosen, for CUDA graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def every_expert(layer, x, topk_output, moe_runner_config) -> torch.Tensor:
    """Experts' sum ``[T, D]`` of ``x`` ``[T, D]``: each expert computes every token.

    Upstream's version computes the chosen ones and waits for the device to learn which they are. Both
    round at the same places.
    """
    from sglang.srt.layers.activation import SiluAndMul

    if moe_runner_config.activation != "silu" or moe_runner_config.gemm1_alpha is not None:
        raise NotImplementedError("the reference engine has experts with plain silu only")
    activate = SiluAndMul()
    outs = torch.stack(
        [
            F.linear(activate(F.linear(x, w13)), w2)
            for w13, w2 in zip(layer.w13_weight, layer.w2_weight, strict=True)
        ],
        1,
    )
    weights, ids, _ = topk_output
    chosen = torch.gather(outs, 1, ids.long().unsqueeze(-1).expand(-1, -1, outs.shape[-1]))
    return (chosen.type(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1).type(x.dtype)
