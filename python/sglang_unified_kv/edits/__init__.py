"""All contact with SGLang's internals, one module per upstream area, in the order of application.

Importing declares the edits; nothing is touched before ``SERIES.apply()``.
"""

from . import (  # noqa: F401
    engagement,
    server_args,
)
from .series import SERIES

__all__ = ["SERIES"]
