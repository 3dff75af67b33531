"""HiSparse on a GPU with upstream's own kernels: streams, pinned rows, and swap-ins inside CUDA graphs."""

import pytest
import torch
from hisparse_engine import assert_nothing_is_held, coordinator_of, engine_of, run, run_together
from sglang_unified_kv.reference.harness import prompt

# Requests of 600 rows, one whose rows all stay hot, one that grows beyond its buffer.
PROMPTS = [prompt(1, 2400), prompt(2, 300), prompt(3, 2047), prompt(4, 2900)]
TOKENS = 40


@pytest.mark.parametrize(
    "graphs, overlap",
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["eager", "eager, overlap", "graphs", "graphs, overlap"],
)
def test_equals_the_run_with_all_rows_on_the_device(make_engine, graphs, overlap):
    options = dict(
        disable_cuda_graph=not graphs,
        disable_prefill_cuda_graph=True,
        cuda_graph_bs_decode=[1, 2, 4],
        chunked_prefill_size=1024,
        disable_overlap_schedule=not overlap,
    )
    with engine_of(make_engine, hisparse=False, **options) as engine:
        alone = [run(engine, ids, TOKENS) for ids in PROMPTS]
        together = run_together(engine, PROMPTS, TOKENS)
    with engine_of(make_engine, hisparse=True, **options) as engine:
        swap = coordinator_of(engine).swap
        for ids, resident in zip(PROMPTS, alone, strict=True):
            assert run(engine, ids, TOKENS).same_bits(resident)
            engine.step()
            assert_nothing_is_held(engine)
        assert int(swap._counts.sum()) > 0, "the last swap-in loaded nothing"
        for _ in range(2):
            answers = run_together(engine, PROMPTS, TOKENS)
            for mine, resident in zip(answers, together, strict=True):
                assert mine.same_tokens(resident)
            engine.step()
            assert_nothing_is_held(engine)
    torch.cuda.synchronize()
