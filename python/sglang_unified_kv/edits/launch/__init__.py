"""Launch arguments: facts for the decision, our flags; and the decision itself, in every process."""

from . import arguments, decision  # noqa: F401, I001
