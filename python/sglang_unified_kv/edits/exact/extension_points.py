"""Extension points on SGLang's base classes: inert members that a backend or a cache may implement.

Ordering contract, for one batch on one rank:

1. ``BasePrefixCache.restore_swa_windows(req)`` while the batch is prepared, once for every request that
   gets a fresh row with a cached prefix, before the row is allocated. It may only *request* the restore.
2. The restore itself runs on the current stream at the start of the target model's forward: after the
   engine reset the slot's C4 state, before any layer reads.
3. ``AttentionBackend.capture_swa_windows`` inside every eager extend layer, before that layer's chunk is
   stored into the window ring.
4. ``AttentionBackend.capture_swa_windows_decode`` and ``.capture_compress_state_windows_decode`` behind
   the step's last forward, outside any graph, on the forward's stream; possibly several times per step.

With speculation the draft model's backend is called as well, 3 in the forward that extends its ring and 4
behind that forward; never in a forward that only drafts. All return None and change nothing of a model's
state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..series import SERIES

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_BACKEND = "sglang.srt.layers.attention.base_attn_backend:AttentionBackend"
_CACHE = "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache"
_FIELDS = {"feature": "bit-exact hicache", "why": "extension point, inert by default"}


@SERIES.member(f"{_BACKEND}.capture_swa_windows", **_FIELDS)
def capture_swa_windows(
    self,
    *,
    layer: RadixAttention,
    kv: torch.Tensor,
    forward_batch: ForwardBatch,
    k_rope: torch.Tensor | None = None,
) -> None:
    """Capture windows at boundaries inside the chunks of an extend.

    Args:
        layer: the attention layer about to store its rows.
        kv: ``[tokens, row width]``, the chunk's KV rows in the pool's row format, batch order.
        forward_batch: the forward in progress.
        k_rope: ``[tokens, rope width]``, the rope half of the rows in the fp8 two-pool layout.
    """


@SERIES.member(f"{_BACKEND}.capture_swa_windows_decode", **_FIELDS)
def capture_swa_windows_decode(self, forward_batch: ForwardBatch) -> None:
    """Capture windows at boundaries that the forward just ended at, from the window rings."""


@SERIES.member(f"{_BACKEND}.capture_compress_state_windows_decode", **_FIELDS)
def capture_compress_state_windows_decode(self, forward_batch: ForwardBatch) -> None:
    """Capture C4 and indexer overlap state at boundaries that the forward just ended at."""


@SERIES.member(f"{_CACHE}.restore_swa_windows", **_FIELDS)
def restore_swa_windows(self, req: Req) -> None:
    """Request that window and overlap state of ``req.prefix_len`` be put into the row it is about to get."""
