"""What a scheduler rank says that it runs: once at start, in its log and as a metric; ``check`` compares it.

Imports no sglang.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from .hooking.series import Series
from .metrics import ENGAGED

ALIKE = (
    "features",
    "plugin_version",
    "sglang_version",
    "edits",
    "edits_digest",
    "policy",
    "stride",
    "provenance",
    "storage",
    "checksum",
    "layout",
    "record_bytes",
)
"""What all ranks of a server must have in common."""
ALIKE_IN_GROUP = ("records", "staging_slots")
"""What the ranks of one attention group must have in common; a data-parallel rank sizes its own."""
START_SPREAD_S = 1800.0
"""Seconds within which all ranks of a server start; one that started longer before is another server's."""
_LEFT = "empty PROMETHEUS_MULTIPROC_DIR before the start, and give every server and node its own"


@dataclass(frozen=True)
class Attestation:
    """What is engaged on a rank; all of it text, as labels are. Empty where exact reuse is not engaged.

    Attributes:
        features: engaged, joined by ``+``: ``hicache`` or ``radix`` for exact reuse, ``ring``, ``hisparse``.
        plugin_version, sglang_version: installed.
        edits: number of edits that were verified and applied.
        edits_digest: of their targets and fingerprints.
        policy, stride: where checkpoints are taken; pages between the closest.
        records, record_bytes, host_gb: of the host pool; GB are 1e9 bytes.
        staging_slots, staging_gb: of device staging.
        provenance: ``live`` or ``strict``.
        storage: backend at start, ``none`` without.
        checksum: 1 with ``SGLANG_SWA_DBG_CHECKSUM``.
        layout: fingerprint of a record's byte layout.
    """

    features: str
    plugin_version: str
    sglang_version: str
    edits: str
    edits_digest: str
    policy: str = ""
    stride: str = ""
    records: str = ""
    record_bytes: str = ""
    host_gb: str = ""
    staging_slots: str = ""
    staging_gb: str = ""
    provenance: str = ""
    storage: str = ""
    checksum: str = ""
    layout: str = ""

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value)

    @classmethod
    def of_labels(cls, labels: Mapping[str, str]) -> Attestation:
        """From the labels of the metric; a label that is not there is empty."""
        return cls(**{f.name: labels.get(f.name, "") for f in fields(cls)})


assert tuple(ENGAGED.labels) == tuple(f.name for f in fields(Attestation))


def digest(series: Iterable[Series]) -> tuple[int, str]:
    """Number of edits, and first 16 hex digits of SHA-256 over their targets and fingerprints."""
    lines = sorted(f"{e.target} {e.kind.value} {e.fingerprint}" for one in series for e in one)
    return len(lines), hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@dataclass(frozen=True, order=True)
class Rank:
    """Coordinates of a scheduler process. ``dp`` is 0 without data parallelism."""

    dp: int
    tp: int

    def __str__(self) -> str:
        return f"dp{self.dp} tp{self.tp}"


def expected_ranks(server_info: Mapping[str, Any], alone: int = 0) -> list[Rank]:
    """The scheduler processes of a server, by its ``/server_info``.

    With DP attention (``attn_dp_size``, to which SGLang resolves ``--dp-size N --enable-dp-attention``) the
    data-parallel ranks share the tensor-parallel group; otherwise (``dp_size``) each has its own. Of a server
    on several nodes, those of the node that answers: each exports its own.

    Args:
        alone: data-parallel rank of a server that has one, which ``SGLANG_DP_RANK`` sets.

    Raises:
        ValueError: the server has pipeline stages.
        KeyError: a size is not in ``server_info``.
    """
    if server_info["pp_size"] > 1:
        raise ValueError(
            f"--pp-size {server_info['pp_size']}: ranks of pipeline stages are not compared"
        )
    tp, dp, attention = (server_info[name] for name in ("tp_size", "dp_size", "attn_dp_size"))
    nodes, node = server_info["nnodes"], server_info["node_rank"]
    here = range(tp // nodes * node, tp // nodes * (node + 1))
    if attention > 1:
        return [Rank(rank * attention // tp, rank) for rank in here]
    if dp == 1:
        return [Rank(alone, rank) for rank in here]
    return [Rank(group, rank) for group in range(dp) for rank in here]


def disagreements(
    found: Mapping[Rank, Sequence[Attestation]],
    expected: Collection[Rank],
    started: Mapping[Rank, float],
) -> list[str]:
    """What is wrong with a server whose ranks said ``found``: a line each, empty if nothing is.

    Args:
        started: when each of them did, in seconds since the epoch.
    """
    missing = [rank for rank in expected if rank not in found]
    if missing and not found:
        return [
            "no scheduler rank says that anything is engaged: the server runs SGLang as released. Set a "
            "switch in its environment, and see its log for what is missing"
        ]
    reasons = []
    if missing:
        reasons.append(
            f"{', '.join(map(str, missing))}: no attestation, so SGLang runs as released there. Give every "
            "rank the same environment, and see its log for what is missing"
        )
    if foreign := sorted(found.keys() - set(expected)):
        reasons.append(
            f"{', '.join(map(str, foreign))}: no rank of this server, so another one's: {_LEFT}"
        )
    latest = max(started.values(), default=0.0)
    if old := sorted(rank for rank, when in started.items() if when < latest - START_SPREAD_S):
        reasons.append(
            f"{', '.join(map(str, old))}: started more than {START_SPREAD_S / 60:.0f} minutes before "
            f"the latest rank, so an earlier server's: {_LEFT}"
        )
    reasons += [
        f"{rank} says {len(said)} different things, so one is an earlier server's: {_LEFT}"
        for rank, said in sorted(found.items())
        if len(said) > 1
    ]
    if reasons:
        return reasons
    only = {rank: said for rank, (said,) in found.items()}
    reasons = _differing(only, ALIKE)
    for group in sorted({rank.dp for rank in only}):
        members = {rank: said for rank, said in only.items() if rank.dp == group}
        reasons += _differing(members, ALIKE_IN_GROUP)
    return reasons


def _differing(found: Mapping[Rank, Attestation], names: Iterable[str]) -> list[str]:
    reasons = []
    for name in names:
        values: dict[str, list[str]] = {}
        for rank in sorted(found):
            values.setdefault(getattr(found[rank], name), []).append(str(rank))
        if len(values) > 1:
            said = "; ".join(
                f"{value or 'none'} on {', '.join(at)}" for value, at in values.items()
            )
            reasons.append(f"the ranks disagree on {name}: {said}")
    return reasons
