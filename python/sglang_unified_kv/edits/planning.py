"""The sizes of pools that do not exist yet: SGLang's own sizer, asked without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

from .. import engage
from ..checkpoint.record_format import HEADER_BYTES
from ..config import Settings
from ..ring.capacity import Machine, Sizes
from .build import default_records, host_records, policy_name, stride_of
from .pool_sizing import layout_of, staging_bytes


class Planner:
    """Sizes for a model and launch flags.

    Args:
        server_args: resolved ``ServerArgs``, published for this process.

    Raises:
        ValueError: the model is no DeepSeek-V4 on unified KV.
    """

    def __init__(self, server_args):
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_executor.pool_configurator import DSV4PoolConfigurator
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        model = ModelConfig.from_server_args(server_args)
        self.configurator = DSV4PoolConfigurator(
            SimpleNamespace(
                kv_cache_dtype_str="fp8_e4m3",
                model_config=model,
                spec_algorithm=SpeculativeAlgorithm.from_string(server_args.speculative_algorithm),
                layer_info=SimpleNamespace(start_layer=0, end_layer=model.num_hidden_layers),
                pp_size=1,
                sliding_window_size=model.window_size,
                page_size=server_args.page_size,
                attn_dp_size=server_args.attn_dp_size,
                spec_aux_config=None,
            )
        )
        if not self.configurator._unified:
            raise ValueError(
                "the plan is for unified KV: SGLANG_HACK_FLASHMLA_BACKEND=unified_kv_triton"
            )

    def sizes(
        self, available: int, machine: Machine, settings: Settings, running: int | None = None
    ) -> Sizes:
        """What fits into ``available`` device bytes with ``running`` requests (the flags', unless given)."""
        from sglang.srt.runtime_context import get_memory

        sizer = self.configurator
        if running is not None:
            sizer.requested_max_running_requests_per_worker = running
        running = sizer._resolve_max_running_requests_per_worker(available)
        staging = staging_bytes(sizer)
        tokens = sizer.calculate_pool_sizes(available, sizer.page_size).max_total_num_tokens
        engaged = engage.current() is not None
        memory = get_memory()
        ratio = memory.hicache_ratio if memory.enable_hierarchical_cache else 0
        pages = int(tokens // sizer.page_size * ratio)
        record = HEADER_BYTES + layout_of(sizer).record_bytes
        host_page = self.host_page_bytes()
        free = int(machine.host_gb * 1e9) - pages * sum(host_page.values())
        wanted = default_records(settings, int(pages or tokens // sizer.page_size))
        return Sizes(
            per_token=sizer.bytes_per_full_token,
            per_slot=(self.fixed(2 * running) - self.fixed(running)) / running,
            per_checkpoint=record,
            staging=staging,
            fixed=self.fixed(running),
            pools=self.pool_bytes(tokens),
            tokens=tokens,
            tokens_scaled=self.tokens_scaled(available, running),
            slots=sizer._get_num_req_slots(running),
            host_pages=pages,
            host_page=host_page,
            records=host_records(settings, record, wanted, max(free, 0)) if engaged else 0,
            stride=stride_of(settings),
            policy=policy_name(settings),
        )

    def fixed(self, running: int) -> int:
        """Device bytes of the request slots: rings and compressor states."""
        sizer = self.configurator
        return int(
            sizer._fixed_swa_bytes(running)
            - staging_bytes(sizer)
            + sizer._fixed_c4_state_bytes(running)
            + sizer._get_c128_state_fixed_bytes(running)
        )

    def pool_bytes(self, tokens: int) -> int:
        """Device bytes of the rows of ``tokens``, and of the pages beside them that nobody is given."""
        from sglang.srt.mem_cache.deepseek_v4_memory_pool import _num_dsv4_physical_kv_pages

        sizer = self.configurator
        page, keys = sizer.page_size, sizer.indexer_bytes_per_token * sizer.num_layers(4)
        rows = (tokens + page) * (sizer.bytes_per_full_token - keys / 4)
        key_pages = _num_dsv4_physical_kv_pages(tokens // 4, page // 4, page)
        return int(rows + key_pages * (page // 4) * keys)

    def host_page_bytes(self) -> dict[str, int]:
        """Bytes of one host page by pool: the compressed rows of 256 tokens, of all layers."""
        sizer = self.configurator
        page, row = sizer.page_size, sizer._get_paged_kv_bytes_per_token(4)
        c4, c128 = sizer.num_layers(4), sizer.num_layers(128)
        return {
            "C4 rows": int(c4 * page // 4 * row),
            "C4 indexer keys": int(c4 * page // 4 * sizer.indexer_bytes_per_token),
            "C128 rows": int(c128 * page // 128 * row),
        }

    def tokens_scaled(self, available: int, running: int) -> int:
        """Full tokens if windows and C4 states took ``--swa-full-tokens-ratio`` of every token's bytes."""
        sizer = self.configurator
        inflation = getattr(sizer, "_spec_infl", 1.0)
        compressed = sizer._get_bytes_per_full_token() * inflation
        per_token = compressed + sizer.swa_ratio * sizer._get_bytes_per_swa_token() * inflation
        left = available - sizer._get_c128_state_fixed_bytes(running)
        return max(int(left / per_token), 0) // sizer.page_size * sizer.page_size
