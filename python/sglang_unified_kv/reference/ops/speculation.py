"""Bookkeeping of EAGLE chains (``--speculative-eagle-topk 1``): slots, the tree, greedy acceptance.

A chain of ``n`` verified tokens is the last committed token and ``n - 1`` drafts behind it.
"""

from __future__ import annotations

import torch


def build_chain(
    parent_list,
    top_scores_index,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    spec_steps,
    num_verify_tokens,
    tree_mask_mode,
) -> None:
    """Fill positions ``[B * n]`` and links ``[B, n]`` of each request's chain; siblings stay -1.

    The mask is not filled: DeepSeek-V4's backends take topk 1 alone and read positions instead.
    """
    if topk != 1:
        raise NotImplementedError(
            f"--speculative-eagle-topk {topk}: the reference engine has chains only; set it to 1"
        )
    step = torch.arange(num_verify_tokens, device=seq_lens.device)
    positions.copy_((seq_lens[:, None] + step).flatten())
    request = torch.arange(len(seq_lens), device=seq_lens.device)[:, None]
    retrieve_index.copy_(step + num_verify_tokens * request)
    retrieve_next_token[:, :-1] = step[1:]


def verify_chain(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    target_predict,
    topk=-1,
):
    """Accept each chain's drafts up to the first that the target would not have chosen.

    Returns:
        ``predicts [B * n]``, the target's token behind every accepted one; ``accept_index [B, n]``, rows
        of accepted tokens, -1 padded; ``accept_token_num [B]``, accepted drafts without the last token.
    """
    agrees = candidates[:, 1:] == target_predict[:, :-1]
    accepted = agrees.long().cumprod(1).sum(1)
    keeps = torch.arange(accept_index.shape[1], device=accepted.device) <= accepted[:, None]
    accept_index.copy_(torch.where(keeps, retrieve_index[:, : keeps.shape[1]], -1))
    rows = target_predict.view(-1)
    predicts.copy_(rows)
    accept_token_num.copy_(accepted)
    return predicts, accept_index, accept_token_num


def last_accepted(accept_tokens, accept_lens, bonus_tokens, accept_stride, batch_size) -> None:
    """``bonus_tokens [B]``: the last of each request's ``accept_lens`` tokens."""
    rows = accept_tokens.view(batch_size, accept_stride)
    bonus_tokens.copy_(rows.gather(1, accept_lens[:, None].long() - 1)[:, 0])


def draft_slots(
    req_pool_indices,
    req_to_token,
    seq_lens,
    out_cache_loc,
    topk,
    num_cols,
    positions=None,
    mrope=None,
) -> None:
    """``out_cache_loc [B * num_cols]``: each request's slots from ``seq_lens`` on."""
    if topk != 1 or mrope is not None:
        raise NotImplementedError("the reference engine drafts chains of text only")
    out_cache_loc.copy_(
        extend_slots(req_pool_indices, req_to_token, seq_lens, len(seq_lens), num_cols)
    )
    if positions is not None:
        positions.copy_(seq_lens)


def extend_slots(
    req_pool_indices,
    req_to_token,
    start_offset,
    batch_size,
    draft_token_num,
    device=None,
    **translation,
) -> torch.Tensor:
    """int64 ``[batch_size * draft_token_num]``: each request's slots from ``start_offset`` on."""
    if any(value is not None for name, value in translation.items() if name != "page_size"):
        raise NotImplementedError("the reference engine has no virtual pages")
    columns = start_offset.long()[:, None] + torch.arange(
        draft_token_num, device=start_offset.device
    )
    return req_to_token[req_pool_indices.long()[:, None], columns].long().flatten()


def last_slots(req_to_token, req_pool_indices_tensor, prefix_lens_tensor) -> torch.Tensor:
    """Slot of each request's last token, -1 for an empty request; dtype of ``prefix_lens_tensor``."""
    last = prefix_lens_tensor.long() - 1
    slots = req_to_token[req_pool_indices_tensor.long(), last.clamp_min(0)]
    return torch.where(last >= 0, slots, -1).to(prefix_lens_tensor.dtype)


def write_slots(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size
) -> None:
    """Note the slots of positions ``[start, end)`` of each request; ``out_cache_loc`` is ragged."""
    counts = end_offset.long() - start_offset.long()
    first = counts.cumsum(0) - counts
    rows = torch.repeat_interleave(req_pool_indices.long(), counts)
    within = torch.arange(len(rows), device=rows.device) - torch.repeat_interleave(first, counts)
    columns = torch.repeat_interleave(start_offset.long(), counts) + within
    req_to_token[rows, columns] = out_cache_loc[: len(rows)].to(req_to_token.dtype)


def clear_rejected_c128(
    state, req_pool_indices, seq_lens, accept_lens, *, ring_size, num_draft_tokens
) -> None:
    """Reset the C128 state rows ``[..., kv | score]`` of drafts at ``seq_lens + accept_lens`` and beyond."""
    step = torch.arange(num_draft_tokens, device=state.device)
    rejected = step >= accept_lens[:, None]
    position = seq_lens.long()[:, None] + step
    rows = (req_pool_indices.long()[:, None] * ring_size + position % ring_size)[rejected]
    half = state.shape[-1] // 2
    state[rows, :half], state[rows, half:] = 0.0, float("-inf")


def relayed_drafts(indices, topk_p_buf, topk_index_buf, output_tokens_buf, hidden_states_buf):
    """Rows ``indices`` of what one step of the overlap schedule leaves to the next; the last may be None."""
    indices = indices.long()
    hidden = hidden_states_buf[indices] if hidden_states_buf is not None else None
    return topk_p_buf[indices], topk_index_buf[indices], output_tokens_buf[indices], hidden
