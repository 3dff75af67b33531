"""What the checkpoint manager knows a request by.

Not its id: a client may use the id of an aborted request again while the engine still finishes that one.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_serials: WeakKeyDictionary[Req, int] = WeakKeyDictionary()
_next = count()


def key_of(req: Req) -> str:
    """``id#serial``, the same for as long as the request object lives, retractions included."""
    if req not in _serials:
        _serials[req] = next(_next)
    return f"{req.rid}#{_serials[req]}"
