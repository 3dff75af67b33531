"""What the loaded weights are called in the namespace of stored objects."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from ....checkpoint.identity import weights_digest


class WeightsName:
    """The same on every rank that holds the same model, whatever its shards.

    Args:
        models: the target, and the draft model if there is one.
        stored: a storage backend is there from the start. Collective over the ranks of the server.

    One rank is called by the digest of its weights, whenever it is asked. Several ranks are called by the
    digests of all of them, exchanged at start. After an update, or where storage is attached later, no rank
    can count on the others to be here: updates fail, and data-parallel ranks are flushed, and idle, one by
    one. Every rank receives the same update calls in the same order, so their number is the name then, and
    what is stored under it serves no other start of the server. A call that failed leaves each rank with
    weights of its own, and with a name of its own from then on.
    """

    def __init__(self, models: list[torch.nn.Module], *, stored: bool):
        self._models = models
        self._history = ""
        self._digest: str | None = None
        self._alone = get_parallel().tp_size == 1
        if not self._alone:
            self._start = _of_all_ranks(secrets.token_hex(16))[0]
            if stored:
                self._digest = " ".join(_of_all_ranks(self._own_digest()))

    def updated(self, done: bool) -> None:
        """A call that may change weights has ended, well or badly."""
        outcome = "done" if done else secrets.token_hex(16)
        self._history = hashlib.sha256(f"{self._history}{outcome}".encode()).hexdigest()
        self._digest = None

    @property
    def lasting(self) -> bool:
        """Whether another start of the server with the same weights has the same name."""
        return self._alone or self._digest is not None

    def now(self) -> str:
        """The name, for the namespace. One rank passes over its weights if they changed since it did."""
        if not self.lasting:
            return f"updates {self._history} of start {self._start}"
        if self._digest is None:
            self._digest = self._own_digest()
        return self._digest

    def _own_digest(self) -> str:
        return weights_digest(self.named_weights())

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
