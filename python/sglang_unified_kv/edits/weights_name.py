"""What the loaded weights are called in the namespace of stored objects."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from ..checkpoint.identity import weights_digest


class WeightsName:
    """The same on every rank that holds the same model, whatever its shards.

    Args:
        models: the target, and the draft model if there is one.

    One rank is called by the digest of its weights, whenever it is asked. Several ranks are called by the
    digests of all of them until the first update. After an update no rank can count on the others to be
    here: updates fail, and data-parallel ranks are flushed one by one. Every rank receives the same calls in
    the same order, so from then on the calls and their outcomes are the name, and what is stored under it
    serves no other start of the server.

    >>> one, other = WeightsName.history("", True), WeightsName.history("", False)
    >>> WeightsName.history(one, False) == WeightsName.history(other, True)
    False
    """

    def __init__(self, models: list[torch.nn.Module]):
        self._models = models
        self._history = ""
        self._digest: str | None = None
        self._alone = get_parallel().tp_size == 1
        self._start = "" if self._alone else _of_all_ranks(secrets.token_hex(16))[0]

    @staticmethod
    def history(before: str, done: bool) -> str:
        """Hex digest of the outcomes of all calls, from that of those before the last one."""
        return hashlib.sha256(f"{before}{int(done)}".encode()).hexdigest()

    def updated(self, done: bool) -> None:
        """A call that may change weights has ended, well or badly."""
        self._history = self.history(self._history, done)
        self._digest = None

    @property
    def lasting(self) -> bool:
        """Whether another start of the server with the same weights has the same name."""
        return self._alone or not self._history

    def now(self) -> str:
        """The name, for the namespace. Passes over the weights if they were not digested since they changed.

        With several ranks and before the first update that is collective, as starting SGLang's storage
        threads is: called where these are started, on every rank.
        """
        if not self.lasting:
            return f"updates {self._history} of start {self._start}"
        if self._digest is None:
            own = weights_digest(self.named_weights())
            self._digest = own if self._alone else " ".join(_of_all_ranks(own))
        return self._digest

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors; the draft's names say so."""
        for prefix, model in zip(("", "draft."), self._models, strict=False):
            for name, tensor in model.state_dict().items():
                yield prefix + name, tensor


def _of_all_ranks(own: str) -> list[str]:
    """What every rank of the server says, by rank. Collective."""
    parallel = get_parallel()
    told: list[Any] = [None] * parallel.tp_size
    torch.distributed.all_gather_object(told, own, parallel.tp_group.cpu_group)
    return told
