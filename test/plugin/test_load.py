"""Loading with the feature asked for: a broken precondition ends the process with its reason."""

import pytest

from scripts import BREAK, LOAD, ON

BROKEN = {
    "missing target": (
        "del arg_utils.add_cli_args_from_dataclass",
        "wrap sglang.srt.arg_groups.arg_utils:add_cli_args_from_dataclass: target is missing",
    ),
    "changed signature": (
        "rewrite(server_args.ServerArgs, 'check_server_args', '(self)', '(self, strict)')",
        "wrap sglang.srt.server_args:ServerArgs.check_server_args: "
        "parameters are (self, strict), expected (self)",
    ),
    "changed source": (
        "rewrite(server_args.ServerArgs, 'check_server_args', 'check_server_args(self)\\n',"
        " 'check_server_args(self)  # now otherwise\\n')",
        "wrap sglang.srt.server_args:ServerArgs.check_server_args: source fingerprint is ",
    ),
    "changed source of what we rely on": (
        "from sglang.srt.beam_search.coordinator import BeamCoordinator\n"
        "rewrite(BeamCoordinator, 'validate_and_init', 'page_size > 1', 'page_size > 512')",
        "relies on sglang.srt.beam_search.coordinator:BeamCoordinator.validate_and_init: "
        "source fingerprint is ",
    ),
    "replaced by foreign code": (
        "server_args.ServerArgs.check_server_args = lambda self: None",
        "wrap sglang.srt.server_args:ServerArgs.check_server_args: "
        "already replaced by code in <test script>",
    ),
    "failure while applying": (
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "def full(target, hooks): raise OSError('no room left')\n"
        "HookRegistry._apply_target = full",
        "applying failed: OSError('no room left')",
    ),
}


def refused(ended, *reasons):
    assert ended.rc == 1, ended.stderr
    for reason in reasons:
        assert reason in ended.stderr
    assert "sglang-unified-kv: refusing to start" in ended.stderr
    assert "still here" not in ended.stdout


@pytest.mark.parametrize("case", BROKEN)
def test_broken_precondition(forks, case):
    breakage, reason = BROKEN[case]
    refused(forks.run(BREAK + breakage + "\n" + LOAD + "print('still here')", ON), reason)


def test_every_reason_is_given_at_once(forks):
    breakage = "\n".join(BROKEN[case][0] for case in ("missing target", "changed source"))
    bad = {"SGLANG_UNIFIED_KV_PROVENANCE": "x", "SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE": "0"}
    refused(
        forks.run(BREAK + breakage + "\n" + LOAD, ON | bad),
        BROKEN["missing target"][1],
        BROKEN["changed source"][1],
        "SGLANG_UNIFIED_KV_PROVENANCE='x' is not allowed",
        "SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE='0' is not allowed",
    )


def test_a_misspelt_switch_does_not_count_as_off(forks):
    name = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"
    refused(forks.run(LOAD, {name: "ture"}), f"{name}='ture' is not allowed: it must be 0 or 1")


def test_another_release_is_refused_with_all_that_differs_in_it(forks, tmp_path):
    info = tmp_path / "sglang-0.5.24.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.24\n")
    other = "sglang 0.5.24 is installed, the edits are written for 0.5.23"
    refused(forks.run(LOAD, ON, path=[tmp_path]), other)
    breakage, reason = BROKEN["changed signature"]
    refused(forks.run(BREAK + breakage + "\n" + LOAD, ON, path=[tmp_path]), other, reason)


def test_no_series_is_applied_if_one_cannot_be(forks):
    script = (
        "from sglang.srt.disaggregation.decode import DecodePreallocQueue\n"
        "del DecodePreallocQueue.pre_allocated_token_counts\n"
        "from sglang.srt.plugins import load_plugins\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "try:\n    load_plugins()\nexcept SystemExit:\n"
        "    ours = [h for t, h in HookRegistry._hooks.items() for _, _, s in h\n"
        "            if s and s.dist_name == 'sglang-unified-kv']\n"
        "    print('hooks of ours:', len(ours))\n    raise"
    )
    ended = forks.run(script, ON | {"SGLANG_UNIFIED_KV_RING_FIXES": "1"})
    refused(ended, "DecodePreallocQueue.pre_allocated_token_counts: target is missing")
    assert ended.stdout == "hooks of ours: 0\n"


HOOK = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    target = "sglang.srt.server_args.ServerArgs.check_server_args"
    HookRegistry.register(target, lambda *args: None, HookType.AFTER)
"""


def test_foreign_hook_registered_before_ours(forks, plugin_dist):
    refused(
        forks.run(LOAD, ON, path=[plugin_dist("rival", HOOK)]),
        "ServerArgs.check_server_args: hooked by another plugin (rival)",
    )


def test_foreign_hook_registered_after_ours(forks, plugin_dist, model):
    # Nobody sees it at load; the audit before the decision does.
    script = (
        f"import sys; sys.path.append({str(plugin_dist('rival', HOOK))!r})\n{LOAD}"
        "from sglang.srt.server_args import ServerArgs\n"
        f"args = ServerArgs(model_path={str(model)!r}, device='cpu')\n"
        "args.resolve_once()\nargs.check_server_args()"
    )
    ended = forks.run(script, ON)
    assert ended.rc == 1
    assert "check_server_args: another plugin registered a hook (rival)" in ended.stderr


def test_entry_point_name_taken_by_another_distribution(forks, plugin_dist):
    impostor = plugin_dist("impostor", "def register(): pass", entry="sglang_unified_kv")
    refused(
        forks.run(LOAD, ON, path=[impostor]),
        "entry point 'sglang_unified_kv' of group 'sglang.srt.plugins' is also provided by "
        "impostor (impostor:register); uninstall it",
    )


def test_import_error_of_ours(forks, tmp_path):
    (tmp_path / "pydantic_settings.py").write_text("raise ImportError('broken on purpose')\n")
    script = "import sys; sys.modules.pop('pydantic_settings', None)\n" + LOAD
    refused(
        forks.run(script, ON, path=[tmp_path]),
        "ImportError: broken on purpose",
        "loading sglang-unified-kv failed",
    )


def test_a_caller_that_tries_again_is_refused_again(forks):
    script = (
        "from sglang.srt.plugins import load_plugins\n"
        "try:\n    load_plugins()\nexcept SystemExit:\n    print('caught')\nload_plugins()"
    )
    ended = forks.run(script, ON | {"SGLANG_UNIFIED_KV_PROVENANCE": "x"})
    refused(ended)
    assert ended.stdout == "caught\n"
    assert ended.stderr.count("SGLANG_UNIFIED_KV_PROVENANCE='x' is not allowed") == 2


def test_unbroken(forks):
    script = LOAD + (
        "from sglang_unified_kv.edits import SERIES\n"
        "assert SERIES.audit() == [], SERIES.audit()\n"
        "print(len(SERIES), 'live')"
    )
    ended = forks.run(script, ON)
    assert (ended.rc, "live" in ended.stdout) == (0, True), ended.stderr
