"""Engagement with SGLang's real arguments, in the launching process and in a rank's scheduler."""

import pytest

from scripts import LOAD, ON

SWITCH = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"
REFERENCE = {"SGLANG_UNIFIED_KV_REFERENCE_ENGINE": "1"}

ARGS = """
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang_unified_kv import engage

def resolved(**more):
    args = ServerArgs(**{**BASE, **more})
    args.resolve_once()
    return args
"""


def script(model, body, **more):
    base = dict(
        model_path=str(model), device="cpu", enable_hierarchical_cache=True, hicache_ratio=2
    )
    base |= more
    return f"{LOAD}BASE = {base!r}\n{ARGS}\n{body}"


LAUNCH = """
import runpy
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""


def flags(model, *more):
    return ["x", "--model-path", str(model), "--device", "cpu", "--skip-tokenizer-init", *more]


def test_engaged_and_decided_anew_for_a_second_engine(forks, model):
    ended = forks.run(
        script(
            model,
            "resolved().check_server_args()\n"
            "assert engage.current().settings.offload_page_stride == 2\n"
            "resolved(enable_hierarchical_cache=False).check_server_args()\n"
            "assert engage.current() is None\n"
            "resolved(extra_metric_labels={'tier': 'unused'}).check_server_args()\n"
            "assert engage.current().decision.state is engage.State.ENGAGED",
        ),
        ON | REFERENCE | {"SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE": "2"},
    )
    assert ended.rc == 0, ended.stderr
    assert ended.stderr.count(f"{SWITCH}=1 has no effect") == 1
    assert "Missing: --enable-hierarchical-cache (" in ended.stderr


def test_launch_server_is_refused_with_every_reason_before_anything_is_built(forks, model):
    ended = forks.run(
        LAUNCH,
        ON | REFERENCE | {"SGLANG_DSV4_COMPRESS_STATE_DTYPE": "bf16"},
        argv=flags(
            model,
            *("--enable-hierarchical-cache", "--hicache-write-policy", "write_back"),
            *("--hicache-storage-backend", "simm", "--enable-streaming-session"),
            *("--lora-paths", "adapter=somewhere"),
            *(
                "--enable-metrics",
                "--extra-metric-labels",
                '{"tier": "a", "team": "b", "state": "c"}',
            ),
        ),
    )
    assert ended.rc == 1
    assert f"Refused: {SWITCH}=1 cannot be honoured:" in ended.stderr
    for reason in (
        "SGLANG_DSV4_COMPRESS_STATE_DTYPE=bf16: set it to float32",
        "--hicache-write-policy write_back: set it to write_through",
        "--hicache-ratio is not given: SGLang then sizes HiCache by --hicache-host-memory-fraction 0.8, "
        "which it cannot for DeepSeek-V4; give --hicache-ratio (sglang-unified-kv plan says which fits)",
        "--hicache-storage-backend simm: not supported, it has no batch_exists_v2, batch_get_v2 and "
        "batch_set_v2, which records travel with; use one of file, nixl, mooncake, dynamic",
        "--enable-lora (--lora-paths sets it) with a storage backend: an adapter is known by its name and "
        "path alone, so one that was trained anew would be served what the old one stored; remove one of "
        "them",
        "--enable-streaming-session: not supported; remove the flag",
        "--extra-metric-labels sets state, tier, which metrics of this plugin have for labels of their own: "
        "rename there, or serve without --enable-metrics",
    ):
        assert f"  - {reason}\n" in ended.stderr
    assert "Load weight" not in ended.stderr


def test_stock_cpu_launch_is_inert_with_one_warning(forks, model):
    ended = forks.run(script(model, "resolved().check_server_args()"), ON)
    assert ended.rc == 0, ended.stderr
    assert ended.stderr.count(f"{SWITCH}=1 has no effect") == 1
    for named in ("ROCm", "SGLANG_HACK_FLASHMLA_BACKEND is 'auto'"):
        assert named in ended.stderr
    assert "cannot be honoured" not in ended.stderr


RANK = """
import pickle
from sglang.srt.managers.scheduler import Scheduler

def upstream(self):
    raise SystemExit("SGLang's own constructor was reached")

Scheduler.init_startup_timing_begin = upstream
args = resolved()
"""


def test_a_rank_refuses_before_it_builds_anything(forks, model):
    ended = forks.run(
        script(model, RANK + "Scheduler(args, None)", hicache_write_policy="write_back"),
        ON | REFERENCE,
    )
    assert ended.rc == 1
    assert "--hicache-write-policy write_back: set it to write_through" in ended.stderr
    assert "constructor was reached" not in ended.stderr


def test_a_rank_that_agrees_with_its_launcher_goes_on_without_repeating(forks, model):
    body = RANK + ("args.check_server_args()\nScheduler(pickle.loads(pickle.dumps(args)), None)")
    ended = forks.run(script(model, body, enable_hierarchical_cache=False), ON | REFERENCE)
    assert "constructor was reached" in ended.stderr
    assert ended.stderr.count(f"{SWITCH}=1 has no effect") == 1


def test_a_rank_that_disagrees_with_its_launcher_is_refused(forks, model):
    body = RANK + (
        "import os\n"
        "args.check_server_args()\n"
        f"os.environ[{SWITCH!r}] = '0'\n"
        "Scheduler(pickle.loads(pickle.dumps(args)), None)"
    )
    ended = forks.run(script(model, body), ON | REFERENCE)
    assert ended.rc == 1
    assert "this rank is inert but its launcher was engaged" in ended.stderr
    assert "constructor was reached" not in ended.stderr


def test_a_rank_audits_when_it_is_built(forks, model):
    body = RANK + (
        "import sglang.srt.server_args as module\n"
        "def built(self, *_):\n"
        "    module.ServerArgs.check_server_args = lambda self: None\n"
        "Scheduler.__init__.__wrapped__.__code__ = built.__code__\n"
        "Scheduler.__init__.__wrapped__.__globals__['module'] = module\n"
        "Scheduler(args, None)"
    )
    ended = forks.run(script(model, body), ON | REFERENCE)
    assert ended.rc == 1
    assert "check_server_args: is no longer the object that was installed" in ended.stderr


# A plugin that is harmless in the launching process and hooks our target in its children.
ONLY_IN_CHILDREN = """
import multiprocessing

def register():
    if multiprocessing.parent_process() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    target = "sglang.srt.managers.scheduler.Scheduler.__init__"
    HookRegistry.register(target, lambda *args: None, HookType.AFTER)
"""


@pytest.mark.slow
def test_failure_in_a_child_process_ends_the_server(forks, model, plugin_dist):
    ended = forks.run(
        LAUNCH,
        ON,
        path=[plugin_dist("rival", ONLY_IN_CHILDREN)],
        argv=flags(model, "--load-format", "dummy", "--max-total-tokens", "4096"),
    )
    assert ended.rc not in (0, None)
    assert "Scheduler.__init__: hooked by another plugin (rival)" in ended.stderr
    assert "sglang-unified-kv: refusing to start" in ended.stderr
