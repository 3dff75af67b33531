"""Writes the tiny DeepSeek-V4 that the reference engine serves.

``python -m sglang_unified_kv.reference.model DIR`` or :func:`write_tiny_model`. Nothing is
downloaded: config, tokenizer and a safetensors checkpoint in DeepSeek's own names come from this
file, the same bytes on every machine. Head, window, page and index sizes are upstream's (its
kernels assert them), all else is small: 4 layers with compress ratios 0, 4, 128, 4, about 6 million
parameters.

With ``next_n`` there is a fifth layer, which drafts for EAGLE. It is built, not trained: its input is the
embedding of the token it is given (plus a little of the target's hidden state), its layer is a copy of
the target's first one, and the target's other layers weigh little, so that both mostly choose the same
token.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path

from sglang_unified_kv.reference.tokenizer import write_tokenizer

CONTENT_VERSION = 1
MARKER = "reference_model.json"

VOCAB = 1024
HIDDEN = 256
HEADS, HEAD_DIM = 4, 512
INDEX_HEADS, INDEX_DIM = 4, 128
Q_RANK, O_RANK, O_GROUPS = 128, 64, 2
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_DIM = 8, 2, 64
STREAMS = 4
COMPRESS_RATIOS = [0, 4, 128, 4]

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "head_dim": HEAD_DIM,
    "index_head_dim": INDEX_DIM,
    "index_n_heads": INDEX_HEADS,
    "index_topk": 512,
    "initializer_range": 0.02,
    "intermediate_size": HIDDEN,
    "moe_intermediate_size": EXPERT_DIM,
    "max_position_embeddings": 16384,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_hidden_layers": len(COMPRESS_RATIOS),
    "num_key_value_heads": 1,
    # Routing by token id in every layer: a rounding difference cannot flip an expert.
    "num_hash_layers": len(COMPRESS_RATIOS),
    "n_hash_layers": len(COMPRESS_RATIOS),
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "q_lora_rank": Q_RANK,
    "o_lora_rank": O_RANK,
    "o_groups": O_GROUPS,
    "kv_lora_rank": HEAD_DIM,
    "qk_nope_head_dim": 448,
    "qk_rope_head_dim": 64,
    "v_head_dim": HEAD_DIM,
    "sliding_window": 128,
    "window_size": 128,
    "compress_ratios": COMPRESS_RATIOS,
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-06,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
}


class _Weights:
    """Named tensors, each seeded by its name.

    Values are sums of four integers in [-128, 128), scaled and rounded to bfloat16: nearly normal,
    the same on every machine, and of so few bits that the engine's float64 sums are exact.
    """

    def __init__(self) -> None:
        self.tensors: dict = {}

    def add(self, name, *shape, std, mean=0.0, dtype=None) -> None:
        import torch

        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randint(-128, 128, (4, *shape), generator=generator).sum(0) + 2
        unit = math.sqrt(12.0 / (4 * (256**2 - 1)))
        value = (mean + whole.double() * (unit * std)).to(torch.bfloat16)
        self.tensors[name] = value if dtype is None else value.to(dtype)

    def copy(self, source: str, target: str) -> None:
        """Every tensor named ``source...`` once more as ``target...``."""
        for name in [n for n in self.tensors if n.startswith(source)]:
            self.tensors[target + name.removeprefix(source)] = self.tensors[name].clone()

    def linear(self, name, rows, columns, gain=1.0, dtype=None) -> None:
        """``[rows, columns]`` whose product with entries of size 1 has entries of size ``gain``."""
        self.add(name, rows, columns, std=gain * columns**-0.5, dtype=dtype)


QUIET = 0.1
"""Gain of what the next-n layer cannot foresee, in a model that has one."""


def _weights(next_n: bool) -> dict:
    """The checkpoint: DeepSeek's tensor names to tensors.

    Gains are chosen so that attention weighs as much as the embedding: other KV gives other tokens.
    """
    import torch

    fp32 = torch.float32
    w = _Weights()
    w.add("embed.weight", VOCAB, HIDDEN, std=1.0)
    w.linear("head.weight", VOCAB, HIDDEN, gain=3.0)
    w.add("norm.weight", HIDDEN, std=0.1, mean=1.0)
    w.linear("hc_head_fn", STREAMS, STREAMS * HIDDEN, dtype=fp32)
    w.add("hc_head_base", STREAMS, std=0.1, dtype=fp32)
    w.add("hc_head_scale", 1, std=0.1, mean=0.5, dtype=fp32)
    for layer, ratio in enumerate(COMPRESS_RATIOS):
        prefix = f"layers.{layer}"
        for part in ("attn", "ffn"):
            mixes = (2 + STREAMS) * STREAMS
            w.add(f"{prefix}.{part}_norm.weight", HIDDEN, std=0.1, mean=1.0)
            w.linear(f"{prefix}.hc_{part}_fn", mixes, STREAMS * HIDDEN, dtype=fp32)
            w.add(f"{prefix}.hc_{part}_base", mixes, std=0.1, dtype=fp32)
            w.add(f"{prefix}.hc_{part}_scale", 3, std=0.1, mean=0.5, dtype=fp32)
        foreseen = layer == 0 or not next_n
        _attention(w, f"{prefix}.attn", ratio, gain=3.0 if foreseen else QUIET)
        _experts(w, f"{prefix}.ffn", layer, gain=QUIET if next_n else 1.0)
    if next_n:
        _next_n(w)
    return w.tensors


def _next_n(w: _Weights) -> None:
    """``mtp.0``: the target's first layer and head behind a projection that passes the embedding on."""
    import torch

    prefix = "mtp.0"
    w.copy("layers.0.", f"{prefix}.")
    del w.tensors[f"{prefix}.ffn.gate.tid2eid"]
    # Next-n layers route by score, not by token id.
    w.add(f"{prefix}.ffn.gate.bias", EXPERTS, std=0.1, dtype=torch.float32)
    w.copy("norm.weight", f"{prefix}.norm.weight")
    w.copy("hc_head_", f"{prefix}.hc_head_")
    for name in ("enorm", "hnorm"):
        w.tensors[f"{prefix}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    w.tensors[f"{prefix}.e_proj.weight"] = torch.eye(HIDDEN, dtype=torch.bfloat16)
    w.linear(f"{prefix}.h_proj.weight", HIDDEN, HIDDEN, gain=QUIET)


def _attention(w: _Weights, prefix: str, ratio: int, gain: float) -> None:
    import torch

    w.add(f"{prefix}.attn_sink", HEADS, std=0.5, dtype=torch.float32)
    w.linear(f"{prefix}.wq_a.weight", Q_RANK, HIDDEN)
    w.add(f"{prefix}.q_norm.weight", Q_RANK, std=0.1, mean=1.0)
    w.linear(f"{prefix}.wq_b.weight", HEADS * HEAD_DIM, Q_RANK)
    w.linear(f"{prefix}.wkv.weight", HEAD_DIM, HIDDEN)
    w.add(f"{prefix}.kv_norm.weight", HEAD_DIM, std=0.1, mean=1.5)
    w.linear(f"{prefix}.wo_a.weight", O_GROUPS * O_RANK, HEADS * HEAD_DIM // O_GROUPS)
    w.linear(f"{prefix}.wo_b.weight", HIDDEN, O_GROUPS * O_RANK, gain=gain)
    if ratio:
        _compressor(w, f"{prefix}.compressor", ratio, HEAD_DIM)
    if ratio == 4:
        w.linear(f"{prefix}.indexer.wq_b.weight", INDEX_HEADS * INDEX_DIM, Q_RANK)
        w.linear(f"{prefix}.indexer.weights_proj.weight", INDEX_HEADS, HIDDEN)
        _compressor(w, f"{prefix}.indexer.compressor", ratio, INDEX_DIM)


def _compressor(w: _Weights, prefix: str, ratio: int, dim: int) -> None:
    import torch

    width = 2 * dim if ratio == 4 else dim
    w.add(f"{prefix}.ape", ratio, width, std=0.5, dtype=torch.float32)
    w.linear(f"{prefix}.wkv.weight", width, HIDDEN)
    w.linear(f"{prefix}.wgate.weight", width, HIDDEN)
    w.add(f"{prefix}.norm.weight", dim, std=0.1, mean=1.5, dtype=torch.float32)


def _experts(w: _Weights, prefix: str, layer: int, gain: float) -> None:
    import torch

    w.linear(f"{prefix}.gate.weight", EXPERTS, HIDDEN)
    token = torch.arange(VOCAB)
    first = (token + layer) % EXPERTS
    second = (first + 1 + token // EXPERTS % (EXPERTS - 1)) % EXPERTS
    w.tensors[f"{prefix}.gate.tid2eid"] = torch.stack([first, second], 1).to(torch.int32)
    for expert in [*(f"experts.{i}" for i in range(EXPERTS)), "shared_experts"]:
        w.linear(f"{prefix}.{expert}.w1.weight", EXPERT_DIM, HIDDEN)
        w.linear(f"{prefix}.{expert}.w3.weight", EXPERT_DIM, HIDDEN)
        w.linear(f"{prefix}.{expert}.w2.weight", HIDDEN, EXPERT_DIM, gain=gain)


def _config(next_n: bool) -> dict:
    if not next_n:
        return CONFIG
    # A ratio for the next-n layer as well, as the published configurations have it.
    return CONFIG | {"num_nextn_predict_layers": 1, "compress_ratios": [*COMPRESS_RATIOS, 0]}


def _fingerprint(config: dict) -> str:
    content = json.dumps([CONTENT_VERSION, config], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _is_written(path: Path, config: dict) -> bool:
    marker = path / MARKER
    return marker.is_file() and json.loads(marker.read_text())["content"] == _fingerprint(config)


def _write_files(directory: Path, next_n: bool) -> None:
    from safetensors.torch import save_file

    config = _config(next_n)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_weights(next_n), directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory, VOCAB)
    (directory / MARKER).write_text(json.dumps({"content": _fingerprint(config)}))


def write_tiny_model(path: Path, *, next_n: bool = False) -> Path:
    """Make ``path`` hold the tiny model and return it; a directory already written is left alone.

    Args:
        next_n: with a next-n layer, for ``--speculative-algorithm EAGLE``; its weights differ throughout.

    Written beside ``path`` and renamed, so that no process ever sees half a model.

    Raises:
        FileExistsError: ``path`` holds something that this function did not write.
    """
    path = Path(path)
    config = _config(next_n)
    if _is_written(path, config):
        return path
    if path.exists() and not (path / MARKER).is_file() and any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty and not a reference model; give another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        new, old = work / "new", work / "old"
        new.mkdir()
        _write_files(new, next_n)
        if path.exists():
            path.rename(old)
        os.rename(new, path)
    except OSError:
        # Another process renamed first; anything else is a real failure.
        if not _is_written(path, config):
            raise
    finally:
        shutil.rmtree(work)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m sglang_unified_kv.reference.model DIR")
    print(write_tiny_model(Path(sys.argv[1])))
