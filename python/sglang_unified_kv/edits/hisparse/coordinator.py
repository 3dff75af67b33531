"""SGLang's HiSparse coordinator over linear rows."""

from __future__ import annotations

import torch
from sglang.srt.managers.hisparse_coordinator import (
    HiSparseAct,
    HiSparseCoordinator,
    device_module,
    resolve_shared_index_layers,
)
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_bytes

from ...checkpoint.rings import upload
from ...hisparse.capacity import cold_pages, tokens_on_host
from ...hisparse.rows import RATIO
from ...hisparse.swap import Residency, Rows, Step, TorchSwap, TritonSwap
from ...hisparse.tables import step_rows
from ...hisparse.tally import Tally
from .pool import promises_of


class UnifiedHiSparseCoordinator(HiSparseCoordinator):
    """Every C4 row is on the host, those that a decode step reads are brought to the device first.

    Raises:
        ValueError: the host memory that all rows need is not there, or the hot buffer is smaller than what
            one decode step reads.
    """

    @classmethod
    def of(cls, runner) -> UnifiedHiSparseCoordinator:
        """The coordinator of a ``ModelRunner`` whose pools are allocated."""
        from sglang.srt.layers.dp_attention import get_dp_tp_group
        from sglang.srt.mem_cache.sparsity import parse_hisparse_config

        config, text = parse_hisparse_config(), runner.model_config.hf_text_config
        return cls(
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            top_k=text.index_topk,
            device_buffer_size=config.device_buffer_size,
            device=runner.device,
            tp_group=get_dp_tp_group().cpu_group,
            host_to_device_ratio=config.host_to_device_ratio,
            swap_in_block_size=config.swap_in_block_size,
            shared_index_layers=resolve_shared_index_layers(hf_text_config=text),
        )

    def __init__(self, req_to_token_pool, token_to_kv_pool_allocator, *, top_k, **options):
        promises = promises_of(token_to_kv_pool_allocator)
        assert promises is not None, "its pool is unified"
        buffer = promises.buffer
        buffer.require(top_k)
        pool = token_to_kv_pool_allocator.hisparse_kvcache
        pages = cold_pages(token_to_kv_pool_allocator.size_full, pool.page_size)
        check_host_memory(pool, pages)
        super().__init__(req_to_token_pool, token_to_kv_pool_allocator, top_k=top_k, **options)
        # The order that the base class keeps for its own kernel. A view of it would keep its memory.
        self._lru_init: torch.Tensor = self._lru_init.new_empty(0)
        self.lru_slots: torch.Tensor = self.lru_slots.new_empty(*self.lru_slots.shape[:2], 0)
        self.saved_rows = 0
        self.host_pools = [self.mem_pool_host] + [
            DeepSeekV4PagedHostPool(
                pool_name="dsv4_hisparse_c4_rope",
                device_buffers=part,
                item_bytes=part[0].shape[1],
                num_host_pages=pages,
                slot_page_size=pool.page_size,
            )
            for part in pool.parts[1:]
        ]
        parts = [
            Rows(
                device=pool.rows(i),
                host=[page.view(-1, page.shape[1] // pool.page_size) for page in host.kv_buffer],
                device_table=host.device_ptrs.view(torch.int64),
                host_table=host.data_ptrs.view(torch.int64),
            )
            for i, host in enumerate(self.host_pools)
        ]
        self.swap: TorchSwap | TritonSwap
        if torch.device(self.device).type == "cpu":
            self.swap = TorchSwap(buffer, parts)
        else:
            self.swap = TritonSwap(buffer, parts, top_k, step_rows(len(self.req_to_host_pool)))
        self.tally = Tally(self.swap.tally)
        # For what is reported: of each part's device rows, one layer's.
        self.layers = len(parts[0].device)
        self.row_bytes = sum(part.device[0].shape[1] for part in parts)
        self.residency = Residency.empty(
            self.req_device_buffer_tokens,
            self.req_device_buffer_token_locs,
            buffer.rows,
            self.req_to_host_pool.shape[1],
        )

    def admit_request_into_staging(self, req) -> None:
        """Save the prompt's rows, beside the schedule; the request decodes once they are on the host."""
        req.hisparse_staging = True
        tokens = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.extend_end]
        device_rows = self.mem_pool_device.translate_loc_from_full_to_hisparse_device(tokens.long())
        host_rows = self._host_rows(req.kv.req_pool_idx, 0, len(device_rows))
        start, finish = device_module.Event(), device_module.Event()
        start.record()
        with device_module.stream(self.write_staging_stream):
            start.wait(self.write_staging_stream)
            self._save(host_rows, device_rows)
            finish.record()
        self.ack_staging_queue.append(HiSparseAct(start, finish, req))

    def alloc_device_buffer(self, req) -> None:
        super().alloc_device_buffer(req)
        self.residency.begin(req.kv.req_pool_idx)

    def map_last_loc_to_buffer(
        self, seq_lens, out_cache_loc, req_pool_indices, seq_lens_cpu, req_pool_indices_cpu
    ) -> None:
        """Save the rows that the step before completed; those that this one completes get their place."""
        lengths, slots = seq_lens_cpu.tolist(), req_pool_indices_cpu.tolist()
        self._save_completed(lengths, slots)
        completing = [i for i, length in enumerate(lengths) if length % RATIO == 0]
        if not completing:
            return
        hot = self.device_buffer_size
        places = [min(lengths[i] // RATIO - 1, hot) for i in completing]
        index, slot, place = upload(
            [completing, [slots[i] for i in completing], places], torch.device(self.device)
        )
        rows = self.req_to_device_buffer[slot, place]
        logical = self.token_to_kv_pool_allocator.get_last_loc_compressed(out_cache_loc[index])
        self.mem_pool_device.full_to_hisparse_device_index_mapping[logical] = rows

    def _save_completed(self, lengths: list[int], slots: list[int]) -> None:
        device, host = [], []
        for length, slot in zip(lengths, slots, strict=True):
            # Once more behind the prompt, whose rows are all saved: the same row to the same place.
            if (length - 1) % RATIO == 0:
                position = (length - 1) // RATIO - 1
                host.append(self._host_rows(slot, position, 1))
                device.append((slot, min(position, self.device_buffer_size)))
        if not device:
            return
        slot, place = upload([*zip(*device, strict=True)], torch.device(self.device))
        device_rows = self.req_to_device_buffer[slot, place]
        self.wait_for_pending_backup()
        schedule = device_module.current_stream()
        with device_module.stream(self.decode_backup_stream):
            self.decode_backup_stream.wait_stream(schedule)
            if self.decode_producer_stream is not None:
                self.decode_backup_stream.wait_stream(self.decode_producer_stream)
            self._save(torch.cat(host), device_rows)
            self._backup_done_event.record()
        self._has_pending_backup = True

    def _host_rows(self, slot: int, start: int, rows: int) -> torch.Tensor:
        return self.mem_pool_host.alloc_paged_token_slots(
            self.req_to_host_pool, self.req_to_host_pool_allocated_len, slot, start, rows
        )

    def _save(self, host_rows: torch.Tensor, device_rows: torch.Tensor) -> None:
        """On the current stream, which neither tensor was allocated on."""
        if len(host_rows) == 0:
            return
        self.saved_rows += len(host_rows)
        self.swap.save(host_rows, device_rows)
        for rows in (host_rows, device_rows):
            if rows.is_cuda:
                rows.record_stream(device_module.current_stream())

    def _run_swap_in_kernel(
        self, req_pool_indices, compressed_seq_lens, top_k_result, layer_id, record_plan=False
    ) -> torch.Tensor:
        step = Step(top_k_result, compressed_seq_lens, req_pool_indices, self.num_real_reqs)
        at = self.residency.layer(layer_id)
        return self.swap.swap_in(layer_id, step, at, self.req_to_host_pool)

    def destroy(self) -> None:
        super().destroy()
        for host in self.host_pools[1:]:
            host.destroy()


def check_host_memory(pool, pages: int) -> None:
    """Before anything is pinned: whether the host pools of all parts fit together.

    Raises:
        ValueError: naming what is requested and what is free, in GB (1e9 bytes), and the tokens that fit.
    """
    page_bytes = sum(layer.shape[1] for part in pool.parts for layer in part)
    requested, free = pages * page_bytes, host_memory_budget_bytes()
    if requested > free:
        fitting = tokens_on_host(free, page_bytes, pool.page_size)
        raise ValueError(
            f"HiSparse keeps all C4 rows on the host: {requested / 1e9:.2f} GB per rank are requested, "
            f"{free / 1e9:.2f} GB are free. Set --max-total-tokens to at most {fitting}, or free host memory."
        )
