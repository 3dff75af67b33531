"""Decode in CUDA graphs with upstream's own kernels: checkpoints are taken beside the graphs."""

import pytest
from gpu_hits import hit_from
from oracle import Recorder, differing
from sglang_unified_kv.reference.harness import prompt

PAGE = 256


def graph_runs(engine, monkeypatch) -> list[int]:
    """The batch size of every decode step that a CUDA graph computes from now on."""
    runner, replayed = engine.model_runner.decode_cuda_graph_runner, []
    execute = runner.execute

    def spy(forward_batch, *args, **kwargs):
        replayed.append(forward_batch.batch_size)
        return execute(forward_batch, *args, **kwargs)

    monkeypatch.setattr(runner, "execute", spy)
    return replayed


@pytest.mark.parametrize("overlap", [False, True], ids=["sequential", "overlap"])
def test_decode_in_cuda_graphs_is_captured_and_resumed(make_engine, monkeypatch, overlap):
    graphs = dict(
        disable_cuda_graph=False,
        disable_prefill_cuda_graph=True,
        cuda_graph_bs_decode=[1, 2, 3, 4],
        chunked_prefill_size=PAGE,
        disable_overlap_schedule=not overlap,
    )
    prompts = [prompt(seed, 500) for seed in range(3)]
    with make_engine(stock=True, **graphs) as engine:
        cold = Recorder(engine).run_many(prompts, 40)
    with make_engine(**graphs) as engine:
        recorder = Recorder(engine)
        replayed = graph_runs(engine, monkeypatch)
        ours = recorder.run_many(prompts, 40)
        assert len(replayed) >= 39 and max(replayed) == 3
        for mine, stock in zip(ours, cold, strict=True):
            assert mine.output_ids == stock.output_ids
            assert 512 in mine.at_boundary, "no decode step ended at the boundary"
        for ids, first in zip(prompts, ours, strict=True):
            turn = ids + first.output_ids + ids[:60]
            hit = hit_from("device", engine, recorder, turn)
            assert hit.cached_tokens == 512
            assert differing(hit.resumed, first.at_boundary[512]) == []
        engine.tree.checkpoints.check_idle()
