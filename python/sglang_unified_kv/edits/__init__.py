"""All contact with SGLang's internals. One room per feature:

- ``launch``: arguments, and the decision of every process;
- ``exact``: exact reuse in cache, scheduler and forward, and what weight updates do to it;
- ``exact.storage``: what stands between HiCache's storage threads and a backend;
- ``ring``: accounting of the ring;
- ``hisparse``: HiSparse on the unified pool;
- ``report``: attestation and metrics.

Importing declares the edits, and they are applied in the order of the imports, here and in each room.
Nothing is touched before ``Series.apply()``.
"""

from . import launch, exact, ring, hisparse, report  # noqa: F401, I001
from .series import HISPARSE_SERIES, REPORT, RING, SERIES

__all__ = ["HISPARSE_SERIES", "REPORT", "RING", "SERIES"]
