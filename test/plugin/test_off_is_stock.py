"""Off is a strict no-op: the same workload with and without our product entry, token for token."""

import json

WORKLOAD = """
import json, sys
from sglang_unified_kv.reference.harness import InProcessEngine, prompt

with InProcessEngine(sys.argv[1], hicache=True, chunked_prefill_size=512, max_total_tokens=2048) as engine:
    outputs = []
    for seed, length in [(0, 700), (1, 600), (0, 700), (0, 600), (2, 900), (3, 900), (0, 700)]:
        outputs.append(engine.run(prompt(seed, length), 4, return_logprob=True))
    from sglang.srt.plugins.hook_registry import HookRegistry
    report = {
        "runs": [[o.output_ids, o.output_logprobs, o.cached_tokens, o.details] for o in outputs],
        "cache": type(engine.tree).__name__,
        "modules": sorted(m for m in sys.modules if m.startswith("sglang_unified_kv")),
        "hooks": sorted(HookRegistry._hooks),
    }
print("REPORT" + json.dumps(report))
"""


def run_workload(forks, model_path, **environ):
    env = {"SGLANG_UNIFIED_KV_REFERENCE_ENGINE": "1", **environ}
    ended = forks.run(WORKLOAD, env, argv=["x", str(model_path)])
    lines = [line for line in ended.stdout.splitlines() if line.startswith("REPORT")]
    assert lines, ended.stderr[-3000:]
    return json.loads(lines[0].removeprefix("REPORT"))


def test_both_entries_with_the_product_off_equal_the_reference_entry_alone(forks, model_path):
    reference = "sglang_unified_kv_reference"
    alone = run_workload(forks, model_path, SGLANG_PLUGINS=reference)
    off = run_workload(
        forks,
        model_path,
        SGLANG_PLUGINS=f"{reference},sglang_unified_kv",
        SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE="0",
    )
    assert off["runs"] == alone["runs"]
    assert any(cached for _, _, cached, _ in off["runs"]), "the workload has no hit"
    assert off["cache"] == alone["cache"] == "UnifiedRadixCache"
    assert off["hooks"] == alone["hooks"], "a hook of the product was registered"
    assert set(off["modules"]) - set(alone["modules"]) == {"sglang_unified_kv.plugin"}
    product = {m for m in off["modules"] if ".reference" not in m}
    # All but the plugin's are the reference engine's.
    assert product <= {
        "sglang_unified_kv",
        "sglang_unified_kv.config",
        "sglang_unified_kv.hooking",
        "sglang_unified_kv.hooking.series",
        "sglang_unified_kv.hooking.upstream",
        "sglang_unified_kv.launches",
        "sglang_unified_kv.names",
        "sglang_unified_kv.plugin",
    }
