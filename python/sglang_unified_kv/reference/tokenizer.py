"""A byte-level tokenizer with DeepSeek's special tokens: any text encodes, any id decodes."""

from __future__ import annotations

import json
from pathlib import Path

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
# What deepseek-recipe asks of a DeepSeek-V4 tokenizer; an id is the place in the list.
SPECIAL_TOKENS = [BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for ``vocab_size`` ids into ``directory``.

    Ids: the special tokens, then the 256 bytes, then one printable filler token each.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet]
    tokens += [f"<{i}>" for i in range(len(tokens), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": 1 << 20,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
