"""--hicache-swa-offload-page-stride on SGLang's own parser, carried in the environment."""

import pytest

from scripts import LOAD, ON

FLAG = "--hicache-swa-offload-page-stride"
VARIABLE = "SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE"

PARSE = LOAD + (
    "import os, sys\n"
    "from sglang.srt.server_args import prepare_server_args\n"
    "from sglang_unified_kv.config import load_settings\n"
    "prepare_server_args(['--model-path', 'm', *sys.argv[1:]])\n"
    f"print(os.environ.get({VARIABLE!r}), load_settings().offload_page_stride)"
)


def parse(forks, *argv, **environ):
    return forks.run(PARSE, ON | environ, argv=["x", *argv])


@pytest.mark.parametrize("argv", [(FLAG, "3"), (f"{FLAG}=3",), (FLAG, "5", FLAG, "3")])
def test_the_flag_reaches_the_settings_and_the_children(forks, argv):
    ended = parse(forks, *argv)
    assert (ended.rc, ended.stdout) == (0, "3 3\n"), ended.stderr


def test_unset(forks):
    assert parse(forks).stdout == "None None\n"


def test_flag_and_variable_may_agree(forks):
    assert parse(forks, FLAG, "3", **{VARIABLE: "3"}).stdout == "3 3\n"


def test_flag_and_variable_must_not_contradict(forks):
    ended = parse(forks, FLAG, "3", **{VARIABLE: "2"})
    assert ended.rc == 2
    assert f"argument {FLAG}: 3 contradicts {VARIABLE}=2" in ended.stderr


@pytest.mark.parametrize(
    "value", ["0", "two", *(pytest.param(v, marks=pytest.mark.slow) for v in ("-1", "1.5"))]
)
def test_bad_value(forks, value):
    ended = parse(forks, f"{FLAG}={value}")
    assert ended.rc == 2
    assert f"argument {FLAG}: {value!r} is not an integer >= 1 (pages)" in ended.stderr


def test_from_a_config_file(forks, tmp_path):
    file = tmp_path / "launch.yaml"
    file.write_text("hicache-swa-offload-page-stride: 4\n")
    ended = parse(forks, "--config", str(file))
    assert (ended.rc, ended.stdout) == (0, "4 4\n"), ended.stderr


def test_it_is_in_the_help(forks):
    ended = parse(forks, "--help")
    assert ended.rc == 0 and f"{FLAG} N" in ended.stdout


def test_a_second_parse_in_one_process_replaces_the_first(forks):
    again = PARSE + (
        f"\nprepare_server_args(['--model-path', 'm', {FLAG!r}, '7'])\n"
        f"print(os.environ[{VARIABLE!r}])"
    )
    ended = forks.run(again, ON, argv=["x", FLAG, "3"])
    assert ended.stdout == "3 3\n7\n", ended.stderr
