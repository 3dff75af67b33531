"""``sglang-unified-kv edits`` and ``doctor``."""

import json
import subprocess
import sys

import pytest

from scripts import ON


def edits(*argv, without):
    """Run the command where the modules ``without`` cannot be imported."""
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({without!r}))\n"
        "from sglang_unified_kv.cli import app; app(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "edits", *argv], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


PRODUCT = [
    "sglang_unified_kv",
    "sglang_unified_kv_ring",
    "sglang_unified_kv_hisparse",
    "sglang_unified_kv_report",
]


def test_edits_lists_every_series_apart_without_sglang():
    series = json.loads(edits("--json", without=("sglang",)).stdout)["series"]
    assert list(series)[: len(PRODUCT)] == PRODUCT
    *features, reference = series.values()
    product = sum(features, [])
    targets = [row["target"] for row in product]
    assert "sglang.srt.managers.scheduler:Scheduler.__init__" in targets
    hooked = [row["target"] for row in product if row["kind"] != "relies on"]
    assert len(hooked) == len(set(hooked)), "two series hook one target"
    for row in product + reference:
        assert row["why"] and row["feature"] and row["kind"], row
        assert row["ours"] == "-" if row["kind"] == "relies on" else row["ours"] != "-", row
    assert not set(targets) & {row["target"] for row in reference if row["kind"] != "relies on"}
    ours = {row["ours"] for row in product}
    assert not any(name.startswith("sglang_unified_kv.reference") for name in ours)


def test_edits_lists_the_product_without_torch_and_says_what_it_left_out():
    done = edits("--json", without=("sglang", "torch"))
    assert list(json.loads(done.stdout)["series"]) == PRODUCT
    assert "reference engine's edits are not listed: torch is not installed" in done.stderr


def test_edits_ends_with_what_a_rank_says_of_itself():
    """test_live_server.py compares it with a rank."""
    listed = json.loads(edits("--json", without=("sglang", "torch")).stdout)
    exact, ring, hisparse, report = (len(listed["series"][name]) for name in PRODUCT)
    hicache, fixes, sparse = (
        f"SGLANG_UNIFIED_KV_{name}" for name in ("BIT_EXACT_HICACHE", "RING_FIXES", "HISPARSE")
    )
    said = {tuple(row["switches"]): row["edits"] for row in listed["ranks"]}
    assert said == {
        (hicache,): exact + report,
        (fixes,): ring + report,
        (sparse,): ring + hisparse + report,
        (hicache, fixes): exact + ring + report,
        (hicache, sparse): exact + ring + hisparse + report,
    }
    text = edits(without=("sglang", "torch")).stdout
    for row in listed["ranks"]:
        shown = "edits={edits} edits_digest={edits_digest}  ".format(**row)
        assert f"\n{shown}{' and '.join(row['switches'])}\n" in text


def test_edits_as_text():
    text = edits(without=("sglang",)).stdout
    # Whole, though no terminal is that wide.
    assert (
        "\nwrap: sglang.srt.managers.scheduler:Scheduler.__init__\n"
        "  ours: sglang_unified_kv.edits.launch.decision.decide_in_rank\n"
        "  for bit-exact hicache: every rank decides for itself before it builds a pool, and checks the "
        "edits when built\n"
    ) in text
    assert text.index("Exact reuse: ") < text.index("Reference engine (tests and demos only): ")
    assert "edits of sglang 0.5.23" in text


def test_version():
    from importlib.metadata import version

    command = [sys.executable, "-m", "sglang_unified_kv.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"sglang-unified-kv {version('sglang-unified-kv')}, for sglang 0.5.23\n"


DOCTOR = "import sys; from sglang_unified_kv.cli import app; app(sys.argv[1:])"
REFERENCE = {"SGLANG_UNIFIED_KV_REFERENCE_ENGINE": "1"}
HICACHE = ("--enable-hierarchical-cache", "--hicache-ratio", "2")
HISPARSE_ON = {"SGLANG_UNIFIED_KV_HISPARSE": "1"}
MISSPELT = "SGLANG_UNIFIED_KV_BIT_EXACT_HICAHE"


@pytest.fixture
def doctor(forks, model):
    def run(*flags, environ=ON | REFERENCE, path=(), code):
        launch = ["--", "--model-path", str(model), "--device", "cpu", *flags] if flags else []
        ended = forks.run(DOCTOR, environ, path, ["x", "doctor", "--json", *launch])
        assert ended.rc == code, ended.stderr
        report = json.loads(ended.stdout)
        assert report["engages"] is (code == 0)
        return report

    return run


def failed(report):
    return {name: reasons for name, reasons in report["checks"].items() if reasons}


def test_doctor_would_engage(doctor):
    report = doctor(*HICACHE, "--hicache-swa-offload-page-stride", "2", code=0)
    assert report["checked"] == "environment and launch flags"
    assert report["decision"] == "engaged" and report["platform_checked"]
    assert report["settings"]["offload_page_stride"] == 2
    assert report["facts"]["architecture"] == "DeepseekV4ForCausalLM"
    assert failed(report) == {}


def test_doctor_without_launch_flags_says_that_it_checked_half(doctor):
    report = doctor(code=0)
    assert report["checked"] == "environment only"
    assert report["decision"] is None
    assert "tp_size" not in report["facts"]


def test_doctor_names_everything_that_is_missing_and_in_the_way(doctor):
    report = doctor("--enable-streaming-session", environ={}, code=1)
    assert report["decision"] == "inert"
    found = failed(report)
    assert found.pop("requested") == [
        "none of SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE, SGLANG_UNIFIED_KV_BIT_EXACT_RADIX, "
        "SGLANG_UNIFIED_KV_HISPARSE is set; set one of them to 1"
    ]
    backend, hicache = found.pop("conditions")
    assert "unified_kv_triton" in backend
    assert hicache.startswith("--enable-hierarchical-cache (")
    assert found.pop("obstacles") == ["--enable-streaming-session: not supported; remove the flag"]
    assert not found


def test_doctor_of_the_flags_alone(forks, model):
    flags = ["--model-path", str(model), "--device", "cpu", "--page-size", "256", *HICACHE]
    flags += ["--attention-backend", "dsv4"]
    environ = ON | {"SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton"}
    ended = forks.run(DOCTOR, environ, argv=["x", "doctor", "--", *flags])
    assert ended.rc == 0, ended.stdout + ended.stderr
    last = "Exact reuse would engage on ROCm; the machine was not checked."
    assert ended.stdout.splitlines()[-1] == last
    ended = forks.run(DOCTOR, environ, argv=["x", "doctor"])
    assert ended.rc == 1 and "ROCm (torch is not a HIP build)" in ended.stdout
    flags = [flag for flag in flags if flag not in HICACHE]
    environ |= HISPARSE_ON
    environ.pop("SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE")
    flags += ["--enable-hisparse", "--disable-radix-cache"]
    ended = forks.run(DOCTOR, environ, argv=["x", "doctor", "--", *flags])
    last = "HiSparse would engage on ROCm; the machine was not checked."
    assert ended.rc == 0 and ended.stdout.splitlines()[-1] == last
    flags += ["--enable-streaming-session"]
    ended = forks.run(DOCTOR, environ, argv=["x", "doctor", "--", *flags])
    assert ended.rc == 1 and "--enable-streaming-session: " in ended.stdout


def test_doctor_would_be_refused(doctor):
    report = doctor(*HICACHE, "--enable-streaming-session", code=1)
    assert report["decision"] == "refused"
    assert failed(report) == {
        "obstacles": ["--enable-streaming-session: not supported; remove the flag"]
    }


HISPARSE = REFERENCE | HISPARSE_ON


def test_doctor_of_hisparse(doctor):
    report = doctor("--enable-hisparse", "--disable-radix-cache", environ=HISPARSE, code=0)
    assert (report["feature"], report["decision"]) == ("HiSparse", "engaged")
    report = doctor("--disable-radix-cache", environ=HISPARSE, code=1)
    assert report["decision"] == "inert"
    assert failed(report) == {"conditions": ["--enable-hisparse"]}
    report = doctor("--enable-hisparse", environ=HISPARSE, code=1)
    reason, _ = failed(report)["launch flags"]
    assert "SGLang rejects them: " in reason and "add --disable-radix-cache" in reason


def test_doctor_reports_what_sglang_itself_rejects(doctor):
    assert "launch flags" in failed(doctor("--no-such-flag", code=1))
    report = doctor(*HICACHE, "--chunked-prefill-size", "100", code=1)
    reason, more = failed(report)["launch flags"]
    assert reason.startswith("SGLang rejects them: ") and "chunked_prefill_size" in reason
    assert "ask again" in more


@pytest.mark.parametrize(
    "error, hint",
    [
        (RuntimeError("No accelerator (CUDA, XPU, ...) is available."), "add --device cpu"),
        (
            OSError("We couldn't connect to 'https://huggingface.co'"),
            "a folder with the model's config.json",
        ),
        (ValueError("--page-size 7"), ""),
        (
            ValueError("enable-hierarchical-cache and disable-radix-cache are mutually exclusive"),
            "--disaggregation-mode decode turns the radix cache off",
        ),
    ],
)
def test_doctor_says_what_to_do_about_what_is_no_flag(error, hint):
    from sglang_unified_kv.cli.doctor import _hint

    found = _hint(error, ["--disaggregation-mode", "decode"])
    assert hint in found and bool(hint) == bool(found)


def test_doctor_sees_what_the_plugin_itself_cannot(doctor, plugin_dist):
    report = doctor(environ=ON | {"SGLANG_PLUGINS": "other"}, code=1)
    assert failed(report)["plugin entry"] == [
        "SGLANG_PLUGINS=other leaves out sglang_unified_kv; add it or unset it"
    ]
    impostor = plugin_dist("impostor", "def register(): pass", entry="sglang_unified_kv")
    (reason,) = failed(doctor(path=[impostor], code=1))["plugin entry"]
    assert "also provided by impostor" in reason


def test_doctor_gives_every_reason_of_the_settings_and_the_preflight(forks):
    broken = (
        "import sglang.srt.server_args as s; s.ServerArgs.check_server_args = lambda self: None\n"
    )
    environ = ON | {"SGLANG_UNIFIED_KV_PROVENANCE": "x"}
    ended = forks.run(broken + DOCTOR, environ, argv=["x", "doctor"])
    assert ended.rc == 1
    assert "SGLANG_UNIFIED_KV_PROVENANCE='x' is not allowed" in ended.stdout
    assert "check_server_args: already replaced by code in" in ended.stdout
    assert "Exact reuse would not engage here." in ended.stdout


def test_doctor_names_a_misspelt_variable_that_is_the_only_switch(doctor):
    (reason,) = failed(doctor(environ=REFERENCE | {MISSPELT: "1"}, code=1))["settings"]
    assert reason.startswith(f"{MISSPELT}='1': there is no such variable; did you mean ")


def test_doctor_in_words(forks):
    ended = forks.run(DOCTOR, ON | REFERENCE, argv=["x", "doctor"])
    assert ended.rc == 0, ended.stderr
    assert ended.stdout.startswith("checked: environment only (sglang 0.5.23)")
    assert "Add `-- LAUNCH FLAGS`" in ended.stdout
