"""The tiny model: the same bytes everywhere, loaded by SGLang's own loader, sensitive to its KV."""

import hashlib
import logging
import runpy
import sys

import pytest
import torch
from safetensors import safe_open
from sglang_unified_kv.reference.harness import prompt
from sglang_unified_kv.reference.model import CONTENT_VERSION, MARKER, write_tiny_model

# Change CONTENT_VERSION together with these: caches and oracles are keyed by what they say.
DIGESTS = {
    1: {
        "config.json": "8cfa4cc448f64637",
        "model.safetensors": "4723e98581ae09c0",
        "tokenizer.json": "8700681fe7ad9f6d",
        "tokenizer_config.json": "0b3fda88e4e5ab68",
    }
}


NEXT_N_DIGESTS = {1: {"config.json": "27a8bfdd27d716f3", "model.safetensors": "d1962703333cadce"}}


def digests(path):
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in path.iterdir()
        if file.name != MARKER
    }


def test_its_bytes_are_fixed(model_path, tmp_path):
    assert digests(model_path) == DIGESTS[CONTENT_VERSION]
    assert digests(write_tiny_model(tmp_path / "again")) == DIGESTS[CONTENT_VERSION]


def test_the_bytes_with_a_next_n_layer_are_fixed(next_n_path, tmp_path):
    found = digests(next_n_path)
    assert NEXT_N_DIGESTS[CONTENT_VERSION].items() <= found.items()
    assert digests(write_tiny_model(tmp_path / "again", next_n=True)) == found


def test_one_model_replaces_the_other(tmp_path):
    write_tiny_model(tmp_path / "model", next_n=True)
    assert digests(write_tiny_model(tmp_path / "model")) == DIGESTS[CONTENT_VERSION]


def test_module_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["model", str(tmp_path / "model")])
    runpy.run_module("sglang_unified_kv.reference.model", run_name="__main__")
    assert capsys.readouterr().out == f"{tmp_path / 'model'}\n"
    assert digests(tmp_path / "model") == DIGESTS[CONTENT_VERSION]


def test_writing_twice_leaves_the_first_alone(tmp_path):
    path = write_tiny_model(tmp_path / "model")
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert write_tiny_model(path) == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_an_older_version_is_replaced_whole(tmp_path):
    path = write_tiny_model(tmp_path / "model")
    (path / MARKER).write_text('{"content": "older"}')
    (path / "stale.txt").write_text("from another version")
    assert digests(write_tiny_model(path)) == DIGESTS[CONTENT_VERSION]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_somebody_elses_directory_is_refused(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not a reference model"):
        write_tiny_model(tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_the_real_loader_loads_every_weight(make_engine, model_path, caplog):
    with caplog.at_level(logging.WARNING), make_engine(stock=True, hicache=False) as engine:
        assert engine.server_args.load_format == "auto"
        parameters = {
            name: parameter.detach().clone()
            for name, parameter in engine.model_runner.model.named_parameters()
        }
    complaints = ("not initialized from checkpoints", "not found in params_dict")
    assert not [m for m in caplog.messages if any(c in m for c in complaints)]
    assert all(p.float().isfinite().all() for p in parameters.values())

    with safe_open(model_path / "model.safetensors", framework="pt") as file:
        written = {name: file.get_tensor(name) for name in file.keys()}
    layer = "model.layers.3"
    assert torch.equal(parameters["lm_head.weight"], written["head.weight"])
    assert torch.equal(
        parameters[f"{layer}.self_attn.wqkv_a.weight"],
        torch.cat([written["layers.3.attn.wq_a.weight"], written["layers.3.attn.wkv.weight"]]),
    )
    assert torch.equal(
        parameters[f"{layer}.self_attn.indexer.compressor.wkv_gate.weight"],
        torch.cat(
            [
                written["layers.3.attn.indexer.compressor.wkv.weight"],
                written["layers.3.attn.indexer.compressor.wgate.weight"],
            ]
        ),
    )
    assert torch.equal(
        parameters[f"{layer}.mlp.experts.w2_weight"][5], written["layers.3.ffn.experts.5.w2.weight"]
    )
    assert torch.equal(
        parameters[f"{layer}.mlp.topk.tid2eid"], written["layers.3.ffn.gate.tid2eid"]
    )
    # The sum of all sizes: nothing in the file was left out.
    assert sum(p.numel() for p in parameters.values()) == sum(w.numel() for w in written.values())


def test_other_prompts_and_other_kv_give_other_tokens(make_engine):
    with make_engine(stock=True, hicache=False) as engine:
        answers = [tuple(engine.run(prompt(seed, 300), 4).output_ids) for seed in range(4)]
        # The same last 150 tokens after another beginning: only KV can tell them apart.
        tail = prompt(9, 150)
        after = [tuple(engine.run(prompt(s, 400) + tail, 4).output_ids) for s in (1, 2)]
        logits = []
        with engine.tap(lambda batch, values: logits.append(values)):
            engine.run(prompt(0, 64), 1)
    assert len(set(answers)) == 4
    assert after[0] != after[1]
    assert 2.0 < logits[0].std().item() < 5.0
