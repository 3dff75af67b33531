"""With no feature asked for: nothing of ours but the entry module and its names, SGLang untouched."""

from scripts import INERT, LOAD, ON

STRIDE = "SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE"
FLAG = "--hicache-swa-offload-page-stride"
SWITCH = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"


def test_only_the_entry_module_is_loaded(forks):
    script = LOAD + (
        "import sys\n"
        "print(sorted(m for m in sys.modules if m.startswith('sglang_unified_kv')\n"
        "      and not m.startswith('sglang_unified_kv.reference')))"
    )
    for environ in ({}, {SWITCH: "0"}):
        ended = forks.run(script, environ)
        assert ended.rc == 0
        assert ended.stdout == INERT
        assert "sglang-unified-kv" not in ended.stderr


def test_the_entry_module_needs_the_standard_library_only(forks):
    script = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import sglang_unified_kv.plugin as plugin\n"
        "plugin.register()\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "assert new <= {'sglang_unified_kv'} | sys.stdlib_module_names, new"
    )
    assert forks.run(script).rc == 0


def test_every_target_is_the_unwrapped_upstream_object(forks):
    # The preflight compares source, parameters and origin of every target.
    script = LOAD + (
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "from sglang_unified_kv.hooking.series import Kind\n"
        "from sglang_unified_kv.edits.series import ALL\n"
        "for series in ALL:\n"
        "    assert len(series) >= 3 and not series.applied\n"
        "    assert series.preflight() == [], series.preflight()\n"
        "    wraps = [e for e in series if e.kind in (Kind.WRAP, Kind.REPLACE)]\n"
        "    assert wraps and not any(HookRegistry._hooks.get(e.dotted) for e in wraps)"
    )
    ended = forks.run(script)
    assert ended.rc == 0, ended.stderr


def test_the_stride_variable_is_ignored_with_one_warning(forks):
    ended = forks.run(LOAD, {STRIDE: "2"})
    assert ended.rc == 0
    assert ended.stderr.count(f"sglang-unified-kv: warning: {STRIDE} is ignored") == 1


MISSPELT = "SGLANG_UNIFIED_KV_BIT_EXACT_HICAHE"


def test_a_misspelt_variable_that_is_the_only_switch_is_named(forks):
    """And nothing is loaded for that; names that are no settings are nobody's misspelling."""
    script = LOAD + "import sys; print(sorted(m for m in sys.modules if 'sglang_unified_kv' in m))"
    mine = {"SGLANG_UNIFIED_KV_ENV_ROOT": "x", "SGLANG_UNIFIED_KV_SERVICE_HOST": "10.0.0.1"}
    ended = forks.run(script, {MISSPELT: "1"} | mine)
    assert ended.rc == 0
    assert "'sglang_unified_kv.plugin'" in ended.stdout and "config" not in ended.stdout
    (said,) = [line for line in ended.stderr.splitlines() if "sglang-unified-kv" in line]
    assert said == (
        f"sglang-unified-kv: warning: {MISSPELT}='1': there is no such variable; did you mean {SWITCH}? "
        "Correct it or unset it. SGLang runs as released: no switch is on"
    )


def test_a_misspelt_variable_beside_a_switch_ends_the_start(forks):
    ended = forks.run(LOAD + "print('still here')", ON | {"SGLANG_UNIFIED_KV_RING_FIXS": "1"})
    assert (ended.rc, ended.stdout) == (1, "")
    assert (
        "SGLANG_UNIFIED_KV_RING_FIXS='1': there is no such variable; did you mean " in ended.stderr
    )
    assert "sglang-unified-kv: warning" not in ended.stderr


def test_children_do_not_repeat_the_warning(forks):
    script = LOAD + (
        "import multiprocessing, sglang.srt.plugins as loader\n"
        "def child():\n"
        "    loader._plugins_loaded = False\n"
        "    loader.load_plugins()\n"
        "    print('loaded', flush=True)\n"
        "process = multiprocessing.get_context('fork').Process(target=child)\n"
        "process.start(); process.join()"
    )
    ended = forks.run(script, {STRIDE: "2", MISSPELT: "1"})
    assert ended.stdout == "loaded\n"
    assert ended.stderr.count(f"{STRIDE} is ignored") == 1
    assert ended.stderr.count(f"{MISSPELT}='1': there is no such variable") == 1


# Runs SGLang's own launcher as `python -m` does, up to the point where its arguments are parsed.
LAUNCH = """
import runpy
import sglang.srt.server_args as server_args
prepare = server_args.prepare_server_args

def stop(argv):
    prepare(argv)
    print("parsed", *argv)
    raise SystemExit(0)

server_args.prepare_server_args = stop
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""


def test_launch_server_starts_without_the_flag(forks):
    for given in ([FLAG, "2"], [f"{FLAG}=2"]):
        argv = ["x", "--model-path", "m", *given, "--tp-size", "2"]
        ended = forks.run(LAUNCH, argv=argv)
        assert ended.rc == 0, ended.stderr
        assert ended.stdout == "parsed --model-path m --tp-size 2\n"
        assert ended.stderr.count(f"sglang-unified-kv: warning: {FLAG} is ignored") == 1


SERVE = "from sglang.cli.main import main; main()"


def test_sglang_serve_has_read_the_flag_already(forks):
    argv = ["sglang", "serve", "--model-type", "llm", "--model-path", "m", FLAG, "2"]
    ended = forks.run(SERVE, argv=argv)
    assert ended.rc == 2
    assert f"sglang-unified-kv: warning: {FLAG} is unknown while {SWITCH} and " in ended.stderr
    assert f"unrecognized arguments: {FLAG} 2" in ended.stderr


def test_launch_server_knows_the_flag_when_on(forks):
    ended = forks.run(LAUNCH, ON, argv=["x", "--model-path", "m", FLAG, "2"])
    assert ended.rc == 0, ended.stderr
    assert ended.stdout == f"parsed --model-path m {FLAG} 2\n"
