"""Two ranks, real processes and collectives: they admit alike, swap alike, and answer as without HiSparse."""

import pytest
from hisparse_engine import TOKENS, assert_nothing_is_held, hisparse_options
from rank_pair import engine_of, rank_pair
from sglang_unified_kv.config import HISPARSE
from sglang_unified_kv.reference.harness import prompt

PLAIN = dict(hicache=False, disable_radix_cache=True, max_total_tokens=TOKENS, context_length=10240)
OURS = PLAIN | hisparse_options()
# More than the device has rows for at a time.
PROMPTS = [prompt(1, 2200), prompt(2, 300), prompt(3, 700), prompt(4, 40)]


@pytest.fixture(scope="module")
def pair():
    with rank_pair() as pair:
        yield pair


def answers(rank, port, model, hisparse, options):
    env = {"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0", HISPARSE: str(int(hisparse))}
    with engine_of(
        rank, port, model, env=env, **(OURS if hisparse else PLAIN), **options
    ) as engine:
        rids = [engine.submit(ids, 10, return_logprob=True) for ids in PROMPTS]
        found = [(o.output_ids, o.output_logprobs) for o in engine.run_many(*rids)]
        engine.step()
        engine.step()
        if hisparse:
            assert_nothing_is_held(engine)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, dict(enable_dp_attention=True, dp_size=2)],
    ids=["tensor parallel", "data-parallel attention"],
)
def test_both_ranks_answer_as_without(pair, model_path, options):
    without = pair(answers, str(model_path), False, options)
    assert pair(answers, str(model_path), True, options) == without
