"""Engines with HiSparse, and what one sees of them."""

from __future__ import annotations

import contextlib
import json
from typing import NamedTuple

import torch
from sglang_unified_kv.config import HISPARSE

BUFFER, PAGE = 512, 64
"""Hot rows: as many as the tiny model reads in a step."""
TOKENS = 24576


def hisparse_options(ratio: int = 3, buffer: int = BUFFER, **server_args) -> dict:
    config = {"top_k": 512, "device_buffer_size": buffer, "host_to_device_ratio": ratio}
    return {"enable_hisparse": True, "hisparse_config": json.dumps(config), **server_args}


@contextlib.contextmanager
def engine_of(make_engine, hisparse: bool, env=None, **server_args):
    """An engine without a radix cache, with HiSparse on the unified pool or without HiSparse."""
    options = {
        "hicache": False,
        "disable_radix_cache": True,
        "max_total_tokens": TOKENS,
        "context_length": 10240,
    }
    if hisparse:
        options |= hisparse_options()
    env = {HISPARSE: str(int(hisparse)), **(env or {})}
    with make_engine(stock=True, env=env, **(options | server_args)) as engine:
        yield engine


class Answer(NamedTuple):
    """What a request answered; ``logits`` ``[tokens, vocab]`` only if it ran alone."""

    output_ids: list[int]
    logprobs: list[float]
    logits: torch.Tensor | None = None

    def same_tokens(self, other: Answer) -> bool:
        return self[:2] == other[:2]

    def same_bits(self, other: Answer) -> bool:
        return self.same_tokens(other) and torch.equal(self.logits, other.logits)


def run(engine, ids, tokens=12) -> Answer:
    """A request that runs alone."""
    logits = []
    with engine.tap(lambda batch, found: logits.append(found[-1:])):
        output = engine.run(ids, tokens, return_logprob=True)
    assert output.cached_tokens == 0
    return Answer(output.output_ids, output.output_logprobs, torch.cat(logits[-tokens:]))


def run_together(engine, prompts, tokens=12) -> list[Answer]:
    rids = [engine.submit(ids, tokens, return_logprob=True) for ids in prompts]
    outputs = engine.run_many(*rids, timeout_s=900)
    engine.step()
    return [Answer(o.output_ids, o.output_logprobs) for o in outputs]


def coordinator_of(engine):
    return engine.scheduler.hisparse_coordinator


def answer_at_once(engine) -> None:
    """From now on the model computes nothing and answers token 0."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.model_runner import ModelRunnerOutput

    def forward(batch, *args, **kwargs):
        logits = torch.zeros(batch.batch_size, engine.scheduler.model_config.vocab_size)
        return ModelRunnerOutput(LogitsProcessorOutput(logits), can_run_graph=False)

    engine.model_runner.forward = forward


def assert_nothing_is_held(engine) -> None:
    """No row, host row, ring or logical token belongs to anyone, and every table is as new."""
    coordinator = coordinator_of(engine)
    allocator = coordinator.token_to_kv_pool_allocator
    rows = allocator.hisparse_attn_allocator
    assert rows.available_size() == rows.size
    assert len(set(rows.get_all_free_pages().tolist())) == rows.size // PAGE
    host = coordinator.mem_pool_host
    assert host.available_size() == host.size
    host._merge_release_slots()
    assert len(set(host.free_slots.tolist())) == host.size
    logical = allocator.logical_attn_allocator
    assert logical.full_available_size() == logical.size_full
    assert logical.swa_available_size() == logical.size_swa
    assert not allocator.full_to_hisparse_device_index_mapping[:-1].any()
    assert (coordinator.req_to_host_pool == -1).all()
    assert not coordinator.req_to_device_buffer.any()
    assert not coordinator.req_device_buffer_size.any()
    assert not coordinator.has_ongoing_staging()
    assert not any(coordinator._skip_first_backup)
