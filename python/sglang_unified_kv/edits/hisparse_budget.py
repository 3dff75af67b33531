"""Admission: SGLang's budget of tokens and ring slots, and device rows besides."""

from __future__ import annotations

from sglang.srt.mem_cache.prefill_budget import SWAPrefillBudget

from .hisparse_allocator import promises_of


class HiSparsePrefillBudget(SWAPrefillBudget):
    """One scheduling pass. SGLang asks for a request and reserves for it before it asks for the next."""

    def __init__(self, allocator, tree_cache, **kwargs):
        super().__init__(allocator, tree_cache, **kwargs)
        promises = promises_of(allocator)
        self._buffer = promises.buffer
        self._rows = promises.left()
        self._asked = 0

    def has_capacity(self) -> bool:
        return super().has_capacity() and self._rows >= self._buffer.padded

    def check_prefill(self, *, input_tokens, **request):
        self._asked = self._buffer.of_life(input_tokens)
        if self._asked > self._rows:
            return False, None
        return super().check_prefill(input_tokens=input_tokens, **request)

    def can_allocate_prefill(self, *, extend_input_len, **request) -> bool:
        # Nothing is cached, so a request that is not yet running extends by all of its tokens.
        self._asked = self._buffer.of_life(extend_input_len)
        return self._asked <= self._rows and super().can_allocate_prefill(
            extend_input_len=extend_input_len, **request
        )

    def reserve(
        self, extend_input_len, max_new_tokens, *, is_chunked_continuation=False, **request
    ):
        super().reserve(
            extend_input_len,
            max_new_tokens,
            is_chunked_continuation=is_chunked_continuation,
            **request,
        )
        # A continued request was promised its rows with its first chunk.
        if not is_chunked_continuation:
            self._rows -= self._asked
