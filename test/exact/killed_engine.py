"""An engine in a process of its own, for a test that kills it."""

from __future__ import annotations

import os

from oracle import Recorder, bytes_of
from storage_folder import STORAGE, at


def serve(model_path: str, folder: str, text: list[int], lengths: list[int], answers) -> None:
    """Answer ``text[:length]`` for every length, each time with empty memory tiers.

    An answer is ``(length, output ids, logits, resumed, tokens from storage)``; logits and the rings at
    the boundary that the request resumed from are bytes.
    """
    os.environ.update(at(folder))
    from sglang.srt.plugins import load_plugins
    from sglang_unified_kv.reference.harness import InProcessEngine

    load_plugins()
    options = dict(hicache=True, max_total_tokens=12288, chunked_prefill_size=512, **STORAGE)
    with InProcessEngine(model_path, **options) as engine:
        recorder = Recorder(engine)
        for length in lengths:
            run = recorder.run(text[:length], 2)
            resumed = None
            if run.cached_tokens:
                resumed = (run.cached_tokens, bytes_of(run.resumed))
            logits = [row.numpy().tobytes() for row in run.logits]
            stored = run.details["storage"] if run.details else 0
            answers.send((length, run.output_ids, logits, resumed, stored))
            engine.flush()
