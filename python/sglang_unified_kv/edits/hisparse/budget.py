"""Admission: SGLang's budget of tokens and ring slots, and device rows besides."""

from __future__ import annotations

from sglang.srt.mem_cache.prefill_budget import SWAPrefillBudget

from .pool import promises_of


class HiSparsePrefillBudget(SWAPrefillBudget):
    """One scheduling pass. SGLang asks for a request and reserves for it before it asks for the next."""

    def __init__(self, allocator, tree_cache, **kwargs):
        super().__init__(allocator, tree_cache, **kwargs)
        promises = promises_of(allocator)
        assert promises is not None, "its pool is unified"
        self._promises = promises
        self._reserved = self._asked = 0

    def _fits(self, prompt_tokens: int) -> bool:
        self._asked = self._promises.buffer.of_life(prompt_tokens)
        return self._asked <= self._promises.left() - self._reserved

    def check_prefill(self, *, input_tokens, **request):
        if not self._fits(input_tokens):
            return False, None
        return super().check_prefill(input_tokens=input_tokens, **request)

    def can_allocate_prefill(self, *, extend_input_len, **request) -> bool:
        # Nothing is cached, so a request that is not yet running extends by all of its tokens.
        return self._fits(extend_input_len) and super().can_allocate_prefill(
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
            self._reserved += self._asked
