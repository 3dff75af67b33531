"""What the ranks of a live server say that they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..attestation import Attestation, Rank, disagreements, expected_ranks
from ..metrics import ENGAGED

if TYPE_CHECKING:
    from .client import SGLangClient


def said_by_ranks(exported: str) -> dict[Rank, list[Attestation]]:
    """What each rank says, from the text of ``/metrics``; more than one thing only if something is wrong."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[Rank, list[Attestation]] = {}
    for family in text_string_to_metric_families(exported):
        for sample in family.samples:
            if sample.name == ENGAGED.name:
                labels = sample.labels
                rank = Rank(int(labels.get("dp_rank", 0)), int(labels["tp_rank"]))
                said = found.setdefault(rank, [])
                if (attestation := Attestation.of_labels(labels)) not in said:
                    said.append(attestation)
    return found


def attest(client: SGLangClient) -> tuple[dict[Rank, list[Attestation]], list[str]]:
    """What the ranks say, and what is wrong with it.

    Raises:
        NoMetrics: the server exports none.
        ClientError: no usable answer.
        ValueError: its ranks are not known.
    """
    expected = expected_ranks(client.server_info())
    found = said_by_ranks(client.metrics())
    return found, disagreements(found, expected)
