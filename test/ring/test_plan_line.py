"""The launch line that a plan ends with: what it carries, that ``doctor`` passes it."""

import json

import pytest
from plan_runs import SERVER, machine, write_pro
from sglang_unified_kv.cli.plan_line import line_of
from sglang_unified_kv.cli.stand_in import write_config
from sglang_unified_kv.launches import BACKEND
from typer.testing import CliRunner

COMMAND = "import sys; from sglang_unified_kv.cli import app; app(sys.argv[1:])"
HICACHE = (
    "--enable-hierarchical-cache --hicache-write-policy write_through --hicache-io-backend direct "
    "--hicache-mem-layout page_first_direct"
).split()
EAGLE = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-num-draft-tokens 4 "
    "--speculative-eagle-topk 1"
).split()
STORAGE = "--hicache-storage-backend file --hicache-storage-prefetch-policy wait_complete".split()
HISPARSE = [
    "--disable-radix-cache",
    "--enable-hisparse",
    "--hisparse-config",
    '{"top_k": 512, "device_buffer_size": 4096, "host_to_device_ratio": 2}',
]
BARE = [f for f in SERVER if f not in ("--max-running-requests", "1024")]
EXACT = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"
RADIX = "SGLANG_UNIFIED_KV_BIT_EXACT_RADIX"
RING = "SGLANG_UNIFIED_KV_RING_FIXES"
BUDGET = "SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB"
FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


@pytest.fixture(scope="module")
def pro(tmp_path_factory):
    return write_pro(tmp_path_factory.mktemp("pro"))


def asked(forks, name, env, options, flags):
    ended = forks.run(COMMAND, env, (), ["x", name, "--json", *options, "--", *flags])
    assert ended.rc == 0 and ended.stdout.startswith("{"), ended.stdout + ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize(
    "flags, env, variables, chosen",
    [
        (HICACHE + EAGLE, {}, {EXACT, RING, BUDGET}, ["--hicache-ratio", "--max-running-requests"]),
        (
            [*HICACHE, *STORAGE, "--max-running-requests", "512"],
            {FOLDER: "/data/h i", "SGLANG_UNIFIED_KV_CHECKPOINT_POLICY": "tails", RING: "0"},
            {EXACT, BUDGET, FOLDER, "SGLANG_UNIFIED_KV_CHECKPOINT_POLICY"},
            ["--hicache-ratio"],
        ),
        ([], {RADIX: "1"}, {RADIX, BUDGET}, ["--max-running-requests"]),
        (HISPARSE, {}, {"SGLANG_UNIFIED_KV_HISPARSE"}, ["--max-running-requests"]),
    ],
    ids=["eagle", "storage", "radix", "hisparse"],
)
def test_doctor_passes_the_line(forks, pro, flags, env, variables, chosen):
    given = ["--model-path", str(pro), *BARE, *flags, "--chunked-prefill-size", "65536"]
    launch = asked(forks, "plan", env, machine(host=400)[1:], given)["launch"]
    assert set(launch["env"]) - set(BACKEND) == variables
    assert env.items() - {(RING, "0")} <= launch["env"].items()
    words = launch["command"]
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert words[3 : 3 + len(given)] == given
    assert words[3 + len(given) :: 2] == chosen
    # The real machine's attention backend does not run here.
    assert launch["env"].pop("SGLANG_HACK_FLASHMLA_BACKEND") == "unified_kv_triton"
    here = launch["env"] | {"SGLANG_UNIFIED_KV_REFERENCE_ENGINE": "1"}
    report = asked(forks, "doctor", here, (), [*words[3:], "--device", "cpu"])
    assert report["engages"] and report["decision"] == "engaged"


def test_what_was_given_stands_before_what_was_chosen():
    command, env = line_of(
        {"SGLANG_A": "b c"}, [EXACT], ["--a", "1"], {BUDGET: "1.5"}, ["--b", "2"]
    )
    assert command == ["python", "-m", "sglang.launch_server", "--a", "1", "--b", "2"]
    assert env == BACKEND | {EXACT: "1", BUDGET: "1.5", "SGLANG_A": "b c"}


def test_the_environment_of_the_launch_stays():
    environ = {
        "HOME": "/root",
        "SGLANG_USE_AITER": "1",
        "SGLANG_EMPTY": "",
        "SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton",
        "SGLANG_UNIFIED_KV_REFERENCE_ENGINE": "1",
        "SGLANG_UNIFIED_KV_PROVENANCE": "strict",
        EXACT: "yes",
        RING: "0",
    }
    _, env = line_of(environ, [EXACT], [], {}, [])
    assert env == BACKEND | {
        EXACT: "1",
        "SGLANG_UNIFIED_KV_PROVENANCE": "strict",
        "SGLANG_USE_AITER": "1",
    }


def test_a_stand_in_config_is_written_and_none_is_overwritten(tmp_path):
    from sglang_unified_kv.cli import app

    folder = tmp_path / "new" / "model"
    done = CliRunner().invoke(app, ["plan", "--write-config", str(folder)])
    assert done.exit_code == 0 and "a stand-in for DeepSeek-V4-Pro's" in done.output
    config = json.loads((folder / "config.json").read_text())
    ratios = config["compress_ratios"]
    assert (len(ratios), ratios.count(4), ratios.count(128)) == (61, 30, 31)
    assert config["num_hidden_layers"] == 61 and config["max_position_embeddings"] == 1 << 20
    (folder / "config.json").write_text("mine")
    done = CliRunner().invoke(app, ["plan", "--write-config", str(folder)])
    output = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and "name a folder without a config.json" in output
    assert (folder / "config.json").read_text() == "mine"
    with pytest.raises(FileExistsError):
        write_config(folder)
