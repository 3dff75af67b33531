"""HiSparse's streams, which torch has for the CPU but for one method."""

from __future__ import annotations

from sglang_unified_kv.reference.edits.series import FEATURE, SERIES


@SERIES.member(
    "torch.cpu:Stream.synchronize",
    feature=FEATURE,
    why="SGLang waits for a stream before it frees what the stream copies; on the CPU nothing is under way",
)
def synchronize(self) -> None:
    return None
