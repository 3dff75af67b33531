"""SGLang's own allocators, trees, queues and sizers on the CPU, with and without the fixes."""

from __future__ import annotations

import contextlib
from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.dsv4 import unified_kv_gate
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator, is_swa_req_ring
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor import pool_configurator
from sglang_unified_kv.config import HISPARSE, RING_FIXES

PAGE, WINDOW, RING = 256, 128, 131
FEATURES = SimpleNamespace(
    enable_encoder_swa_bounded_replay=False,
    enable_decoder_swa_bounded_replay=False,
    enable_memory_saver=False,
)


@contextlib.contextmanager
def switched(fixes: bool):
    """The environment of a server with the fixes on or off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RING_FIXES, str(int(fixes)))
        patch.setenv(HISPARSE, "0")
        patch.setattr(
            "sglang.srt.runtime_context.get_exec", lambda: SimpleNamespace(features=FEATURES)
        )
        yield


class Pool(pools.DeepSeekV4TokenToKVPool):
    """A pool's place in the allocator without its memory; ``ring`` None for the paged layout."""

    def __init__(self, ring: int | None):
        self.swa_req_ring_size = ring
        self.full_to_swa_index_mapping = None
        self.layer_transfer_counter = None

    def get_state_buf_infos(self):
        return [], [], []


def request_slots(count: int) -> ReqToTokenPool:
    return ReqToTokenPool(size=count, max_context_len=8192, device="cpu", enable_memory_saver=False)


def allocator_of(fixes: bool, slots: int, tokens: int, ring: int | None = RING):
    """An allocator and its request slots."""
    rows = request_slots(slots)
    with switched(fixes):
        allocator = SWATokenToKVPoolAllocator(
            tokens, tokens, PAGE, torch.float16, "cpu", Pool(ring), False, req_to_token_pool=rows
        )
    return allocator, rows


class Cached:
    """An allocator with a radix tree over it that holds ``prompts`` of 4,096 tokens."""

    LENGTH = 4096

    def __init__(self, fixes, core, prompts, slots=8, tokens=256 * 1024, ring=RING, disable=False):
        self.allocator, self.slots = allocator_of(fixes, slots, tokens, ring)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=disable,
                req_to_token_pool=self.slots,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
                sliding_window_size=WINDOW,
                swa_gates_prefix_match=not is_swa_req_ring(self.allocator),
                tree_components=(ComponentType.FULL, ComponentType.SWA),
                tree_core_backend=core,
            )
        )
        self._prompts = prompts
        for i in range(prompts):
            value = extend(self.allocator, self.LENGTH).to(torch.int64)
            self.tree.insert(InsertParams(key=self.key(i), value=value))

    def key(self, i: int) -> RadixKey:
        """Tokens of prompt ``i``."""
        ids = array("q", range(i * 100_000, i * 100_000 + self.LENGTH))
        return RadixKey(token_ids=ids, extra_key=None)

    def matched(self) -> int:
        """Tokens of all prompts that a request would find."""
        return sum(
            self.tree.match_prefix(MatchPrefixParams(key=self.key(i))).device_prefix_len
            for i in range(self._prompts)
        )


def extend(allocator, tokens: int):
    """Slots of a new request's first ``tokens``; None if there are not as many."""
    zero, length = torch.tensor([0]), torch.tensor([tokens])
    return allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), tokens)


RATIOS = [128, 128] + [4, 128] * 29 + [4]
"""Compress ratios of DeepSeek-V4-Pro's 61 layers."""


@contextlib.contextmanager
def sizer(
    fixes, *, unified=True, running=1024, speculative=True, mode="null", extra_slots=0, switch=False
):
    """SGLang's sizer of DeepSeek-V4-Pro's pools, DP 8, bf16."""
    algorithm = SimpleNamespace(
        is_dspark=lambda: False, is_eagle=lambda: speculative, is_none=lambda: not speculative
    )
    model = SimpleNamespace(
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        index_head_dim=128,
        context_len=1 << 20,
        compress_ratios=RATIOS,
        hf_config=SimpleNamespace(kv_source_layer_ids=[]),
        window_size=WINDOW,
    )
    configurator = SimpleNamespace(
        kv_cache_dtype_str="fp8_e4m3",
        model_config=model,
        spec_algorithm=algorithm,
        layer_info=SimpleNamespace(start_layer=0, end_layer=len(RATIOS)),
        pp_size=1,
        sliding_window_size=WINDOW,
        page_size=PAGE,
        attn_dp_size=8,
        spec_aux_config=None,
    )
    execution = SimpleNamespace(
        kernel=SimpleNamespace(dsv4_attn_backend=None, enable_deepseek_v4_fp4_indexer=False),
        features=FEATURES,
    )
    schedule = SimpleNamespace(
        max_running_requests=running,
        _swa_full_tokens_ratio_explicitly_set=True,
        swa_full_tokens_ratio=0.1,
        chunked_prefill_size=32768,
        swa_prefix_tails=None,
        page_size=PAGE,
    )
    drafts = 4 if speculative else None
    speculation = SimpleNamespace(
        speculative_algorithm="EAGLE" if speculative else None, speculative_num_draft_tokens=drafts
    )
    disagg = SimpleNamespace(
        disaggregation_mode=mode,
        disaggregation_decode_extra_slots=extra_slots,
        enable_pd_role_switch=switch,
    )
    memory = SimpleNamespace(enable_hisparse=False, disable_radix_cache=False)
    with switched(fixes), pytest.MonkeyPatch.context() as patch:
        for module in (pool_configurator, pools):
            patch.setattr(module, "get_exec", lambda: execution)
            patch.setattr(module, "get_spec", lambda: speculation)
        patch.setattr(pool_configurator, "get_schedule", lambda: schedule)
        for where in ("sglang.srt.runtime_context", pool_configurator.__name__):
            patch.setattr(f"{where}.get_memory", lambda: memory)
            patch.setattr(f"{where}.get_disagg", lambda: disagg)
        patch.setattr(pool_configurator, "max_speculative_num_draft_tokens", lambda: drafts)
        patch.setattr(pool_configurator, "compute_swa_request_cap", lambda **_: 128 * 1024)
        patch.setattr(unified_kv_gate, "is_unified_kv_triton", lambda: unified)
        patch.setattr(unified_kv_gate, "is_unified_kv_fp8", lambda: False)
        yield pool_configurator.DSV4PoolConfigurator(configurator)
