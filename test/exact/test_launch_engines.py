"""An engine from the flags of every launch line that we print: it starts, and hits exactly.

SGLang's own parser reads the flags; ``test_launches.py`` holds that nothing is replaced but what is listed.
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from sglang_unified_kv.cli.server import ServerProcess, free_port
from sglang_unified_kv.launches import LINES, STORAGE_DIR, reduced
from sglang_unified_kv.reference.harness import prompt

NEXT_N = "--speculative-algorithm"
IN_FRONT = ("--port", "--skip-server-warmup", "--skip-tokenizer-init", "--enable-cache-report")
"""Flags of the processes in front of the scheduler."""


def scheduler_flags(line):
    flags = list(line.flags)
    for flag in IN_FRONT:
        if flag in flags:
            at = flags.index(flag)
            del flags[at : at + (2 if flag == "--port" else 1)]
    return tuple(sorted(flags_and_values(flags)))


def flags_and_values(flags):
    found = []
    for word in flags:
        if word.startswith("--"):
            found.append((word,))
        else:
            found[-1] += (word,)
    return found


def groups():
    """Lines that start the same engine, by name."""
    found = {}
    for line in map(reduced, LINES.values()):
        found.setdefault((scheduler_flags(line), tuple(sorted(line.env.items()))), []).append(line)
    return {" and ".join(line.name for line in lines): lines[0] for lines in found.values()}


GROUPS = groups()


def fields_of(line, model):
    """What SGLang's parser makes of the line."""
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    args = prepare_server_args(["--model-path", str(model), *line.flags])
    fields = {field.name: getattr(args, field.name) for field in record_fields(ServerArgs)}
    return {name: value for name, value in fields.items() if name != "model_path"}


@pytest.mark.parametrize("name", GROUPS)
def test_a_line_starts_an_engine_that_hits(name, make_engine, model_path, next_n_path, tmp_path):
    line = GROUPS[name]
    # What the tests set for themselves is not the line's.
    env = {n: None for n in os.environ if n.startswith("SGLANG_UNIFIED_KV_CHECKPOINT_")}
    env |= {"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": "0.1"} | line.env
    if line.storage:
        env[STORAGE_DIR] = str(tmp_path)
    model = next_n_path if NEXT_N in line.flags else model_path
    fields = fields_of(line, model)
    with make_engine(stock=True, env=env, model=model, hicache=False, **fields) as engine:
        for field in (
            "page_size",
            "hicache_mem_layout",
            "hicache_ratio",
            "disable_overlap_schedule",
        ):
            assert getattr(engine.server_args, field) == fields[field]
        ids = prompt(17, 700)
        cold, again = (engine.run(ids, 4, return_logprob=True) for _ in range(2))
        assert cold.cached_tokens == 0
        assert again.cached_tokens == (0 if line.hisparse else 512)
        assert again.output_ids == cold.output_ids
        assert again.output_logprobs == cold.output_logprobs
        engine.drain() if not line.hisparse else None
        assert bool(line.storage) == bool(list(tmp_path.rglob("*.bin")))
