"""What the ranks of a live server say that they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ..attestation import Attestation, Rank, disagreements, expected_ranks
from ..metrics import ENGAGED
from .client import ClientError

if TYPE_CHECKING:
    from .client import SGLangClient


class Said(NamedTuple):
    """What the ranks of one node say.

    Attributes:
        found: more than one thing of a rank only if something is wrong.
        started: when each rank did, in seconds since the epoch.
        reasons: what is wrong, a line each.
        node, nodes: which one answered, from 0, of how many.
    """

    found: dict[Rank, list[Attestation]]
    started: dict[Rank, float]
    reasons: list[str]
    node: int
    nodes: int


def _samples(exported: str) -> Iterator[tuple[Rank, Any]]:
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(exported):
        for sample in family.samples:
            if sample.name == ENGAGED.name:
                labels = sample.labels
                yield Rank(int(labels.get("dp_rank", 0)), int(labels["tp_rank"])), sample


def said_by_ranks(exported: str) -> dict[Rank, list[Attestation]]:
    """What each rank says, from the text of ``/metrics``; more than one thing only if something is wrong.

    Raises:
        KeyError: the label ``tp_rank`` is not there.
    """
    found: dict[Rank, list[Attestation]] = {}
    for rank, sample in _samples(exported):
        said = found.setdefault(rank, [])
        if (attestation := Attestation.of_labels(sample.labels)) not in said:
            said.append(attestation)
    return found


def started_by_ranks(exported: str) -> dict[Rank, float]:
    """When each rank started, in seconds since the epoch.

    Raises:
        KeyError: as :func:`said_by_ranks`.
    """
    return {rank: sample.value for rank, sample in _samples(exported)}


def attest(client: SGLangClient) -> Said:
    """What the ranks say, and what is wrong with it.

    Raises:
        NoMetrics: the server exports none.
        ClientError: no usable answer.
        ValueError: its ranks are not known.
    """
    info, exported = client.server_info(), client.metrics()
    with _named(client, "/metrics"):
        found, started = said_by_ranks(exported), started_by_ranks(exported)
    groups = {rank.dp for rank in found}
    with _named(client, "/server_info"):
        expected = expected_ranks(info, groups.pop() if len(groups) == 1 else 0)
    return Said(
        found,
        started,
        disagreements(found, expected, started),
        info["node_rank"],
        info["nnodes"],
    )


@contextmanager
def _named(client: SGLangClient, path: str) -> Iterator[None]:
    """What is not in an answer is named."""
    try:
        yield
    except KeyError as error:
        raise ClientError(
            f"{client.base_url}{path}: {error.args[0]} is not there; give the address of a server itself, "
            "not of a router"
        ) from error
