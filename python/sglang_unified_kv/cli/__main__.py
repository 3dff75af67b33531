"""``python -m sglang_unified_kv.cli``: the command line without its installed script."""

from . import app

app()
