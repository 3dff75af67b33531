"""The sizes of pools that do not exist yet: SGLang's own sizer, asked without a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from .. import engage
from ..checkpoint.record_format import HEADER_BYTES
from ..config import Settings
from ..edits.exact.build import budgeted_records, default_records, policy_name, stride_of
from ..edits.exact.pool_sizing import layout_of, staging_bytes
from ..edits.hisparse.arguments import hisparse_on
from ..edits.hisparse.sizing import hot_buffer, table_bytes
from ..hisparse.capacity import HiSparseSizes, cold_pages
from ..hisparse.rows import region_rows
from .capacity import Machine, Sizes


class Planner:
    """Sizes for a model and launch flags.

    Args:
        server_args: resolved ``ServerArgs``, published for this process.

    Attributes:
        stages: a sizer for each pipeline stage; one without pipeline parallelism.
        ranks_per_host: schedulers on one host, each with host pools of its own: every tensor-parallel rank
            of every pipeline stage of every data-parallel replica.

    Raises:
        ValueError: the model is no DeepSeek-V4 on unified KV.
    """

    def __init__(self, server_args):
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed.utils import get_pp_indices
        from sglang.srt.model_executor.pool_configurator import DSV4PoolConfigurator
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        model = ModelConfig.from_server_args(server_args)
        count = server_args.pp_size
        everywhere = server_args.dp_size * server_args.tp_size * count
        self.ranks_per_host = max(everywhere // server_args.nnodes, 1)
        self.layers = [
            get_pp_indices(model.num_hidden_layers, stage, count) for stage in range(count)
        ]
        runner = dict(
            kv_cache_dtype_str="fp8_e4m3",
            model_config=model,
            spec_algorithm=SpeculativeAlgorithm.from_string(server_args.speculative_algorithm),
            pp_size=count,
            sliding_window_size=model.window_size,
            page_size=server_args.page_size,
            attn_dp_size=server_args.attn_dp_size,
            spec_aux_config=None,
            mambaish_config=None,
        )
        self.runner = SimpleNamespace(**runner)
        self.stages = [
            DSV4PoolConfigurator(
                SimpleNamespace(
                    **runner,
                    layer_info=SimpleNamespace(start_layer=start, end_layer=end),
                    pp_group=SimpleNamespace(rank_in_group=stage),
                )
            )
            for stage, (start, end) in enumerate(self.layers)
        ]
        if not self.stages[0]._unified:
            raise ValueError(
                "the plan is for unified KV: SGLANG_HACK_FLASHMLA_BACKEND=unified_kv_triton"
            )

    def sizes(
        self,
        available: int,
        machine: Machine,
        settings: Settings,
        running: int | None = None,
        most: int | None = None,
        ratio: float | None = None,
    ) -> Sizes:
        """What fits into ``available`` device bytes of each stage; the figures are the tightest stage's.

        Args:
            available: device bytes for KV pools.
            running: requests of a rank instead of the flags'.
            most: full tokens that ``--max-total-tokens`` allows.
            ratio: ``--hicache-ratio`` where the flags have none.
        """
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

        fitting = [self._fitting(stage, available, running) for stage in range(len(self.stages))]
        tightest = min(range(len(fitting)), key=fitting.__getitem__)
        sizer, tokens = self.stages[tightest], fitting[tightest]
        if most is not None and most < tokens:
            tokens = _capped(sizer, most)
        running = self._running(tokens, running)
        scaled = self.tokens_scaled(sizer, available, running)
        pages = self._host_pages(tokens, ratio)
        record = HEADER_BYTES + layout_of(sizer).record_bytes
        host_page = self.host_page_bytes(sizer)
        free = machine.host_bytes - pages * sum(host_page.values())
        wanted = default_records(settings, int(pages or tokens // sizer.page_size))
        exact = engage.current() is not None
        found = Sizes(
            layers=self.layers[tightest],
            per_token=sizer.bytes_per_full_token,
            per_slot=(self.fixed(sizer, 2048) - self.fixed(sizer, 1024)) / 1024,
            per_checkpoint=record,
            staging=staging_bytes(sizer),
            fixed=self.fixed(sizer, running),
            pools=self.pool_bytes(sizer, tokens),
            tokens=tokens,
            tokens_fitting=fitting[tightest],
            tokens_scaled=scaled if most is None else min(scaled, _capped(sizer, most)),
            slots=sizer._get_num_req_slots(running),
            host_pages=pages,
            host_page=host_page,
            exact=exact,
            records=budgeted_records(settings, record, wanted, max(free, 0)) if exact else 0,
            stride=stride_of(settings),
            policy=policy_name(settings),
            pairs=self.runner.spec_algorithm.is_eagle(),
            ahead=get_alloc_reserve_per_decode() if sizer.is_speculative else 0,
            hisparse=self._hisparse(sizer, tokens, running) if hisparse_on() else None,
        )
        needed = sum(found.host_bytes.values())
        return replace(found, host_shortfall=max(needed - machine.host_bytes, 0))

    def _fitting(self, stage: int, available: int, running: int | None) -> int:
        """Full tokens of a stage, as SGLang's sizer counts them."""
        sizer = self.stages[stage]
        asked = sizer.requested_max_running_requests_per_worker
        if running is not None:
            sizer.requested_max_running_requests_per_worker = running
        try:
            return sizer.calculate_pool_sizes(available, sizer.page_size).max_total_num_tokens
        finally:
            sizer.requested_max_running_requests_per_worker = asked

    def _running(self, tokens: int, running: int | None) -> int:
        """Requests that get a slot, once the tokens are known."""
        from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

        if running is None:
            running = KVCacheConfigurator.resolve_max_num_reqs(self.runner, tokens)
        return min(running, tokens // 2)

    def _host_pages(self, tokens: int, ratio: float | None) -> int:
        from sglang.srt.runtime_context import get_memory

        memory = get_memory()
        if not memory.enable_hierarchical_cache:
            return 0
        if memory.hicache_size > 0:
            # As its pools do when they are built.
            raise ValueError(
                f"--hicache-size {memory.hicache_size}: not for DeepSeek-V4; use --hicache-ratio"
            )
        ratio = memory.hicache_ratio if ratio is None else ratio
        return int(tokens // self.stages[0].page_size * ratio)

    @staticmethod
    def fixed(sizer, running: int) -> int:
        """Device bytes of the request slots: rings, compressor states and the tables of HiSparse."""
        return int(
            sizer._fixed_swa_bytes(running)
            - staging_bytes(sizer)
            + sizer._fixed_c4_state_bytes(running)
            + sizer._get_c128_state_fixed_bytes(running)
        )

    @staticmethod
    def pool_bytes(sizer, tokens: int) -> int:
        """Device bytes of the rows of ``tokens``, and of the pages beside them that nobody is given."""
        from sglang.srt.mem_cache.deepseek_v4_memory_pool import _num_dsv4_physical_kv_pages

        page, ratio = sizer.page_size, sizer.c4_shrink_factor
        keys = sizer.indexer_bytes_per_token * sizer.num_layers(4)
        row = sizer._get_paged_kv_bytes_per_token(4) * sizer.num_layers(4)
        key_pages = _num_dsv4_physical_kv_pages(tokens // 4, page // 4, page)
        others = sizer.bytes_per_full_token - keys / 4 - row / (4 * ratio)
        rows = region_rows(tokens, ratio, page // 4) + page // 4
        return round((tokens + page) * others + rows * row + key_pages * (page // 4) * keys)

    @classmethod
    def _hisparse(cls, sizer, tokens: int, running: int) -> HiSparseSizes:
        page = sizer.page_size // 4
        return HiSparseSizes(
            ratio=sizer.c4_shrink_factor,
            buffer=hot_buffer(sizer),
            rows=region_rows(tokens, sizer.c4_shrink_factor, page),
            tables=table_bytes(sizer, running),
            cold_page=cls.host_page_bytes(sizer)["C4 rows"],
            cold_pages=cold_pages(tokens, page),
            context=sizer.context_len,
        )

    @staticmethod
    def host_page_bytes(sizer) -> dict[str, int]:
        """Bytes of one host page by pool: the compressed rows of 256 tokens, of all layers."""
        page, row = sizer.page_size, sizer._get_paged_kv_bytes_per_token(4)
        c4, c128 = sizer.num_layers(4), sizer.num_layers(128)
        return {
            "C4 rows": int(c4 * page // 4 * row),
            "C4 indexer keys": int(c4 * page // 4 * sizer.indexer_bytes_per_token),
            "C128 rows": int(c128 * page // 128 * row),
        }

    @staticmethod
    def tokens_scaled(sizer, available: int, running: int) -> int:
        """Full tokens if windows and C4 states took ``--swa-full-tokens-ratio`` of every token's bytes.

        Checkpoint staging and the tables of HiSparse are subtracted here as they are from the ring's figure.
        """
        inflation = getattr(sizer, "_spec_infl", 1.0)
        compressed = sizer._get_bytes_per_full_token() * inflation
        per_token = compressed + sizer.swa_ratio * sizer._get_bytes_per_swa_token() * inflation
        fixed = sizer._get_c128_state_fixed_bytes(running) + table_bytes(sizer, running)
        left = available - fixed - staging_bytes(sizer)
        return max(int(left / per_token), 0) // sizer.page_size * sizer.page_size


def _capped(sizer, most: int) -> int:
    return sizer.calculate_pool_sizes_from_max_tokens(most, sizer.page_size).max_total_num_tokens
