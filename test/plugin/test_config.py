"""Settings: what each variable may hold, and that every bad one is named at once."""

import re
from pathlib import Path

import pydantic
import pytest
from sglang_unified_kv import names
from sglang_unified_kv.config import ConfigError, Settings, load_settings, variables

HICACHE = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"
STRIDE = "SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE"
HOST_GB = "SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB"
STAGING = "SGLANG_SWA_HICACHE_STATE_STAGING_PAGES"
PROVENANCE = "SGLANG_UNIFIED_KV_PROVENANCE"
POLICY = "SGLANG_UNIFIED_KV_CHECKPOINT_POLICY"

BAD = {
    HICACHE: "maybe",
    STRIDE: "0",
    POLICY: "best",
    HOST_GB: "inf",
    STAGING: "1.5",
    PROVENANCE: "dead",
}


def test_defaults():
    assert load_settings({}) == Settings(
        bit_exact_hicache=False,
        offload_page_stride=None,
        checkpoint_policy=None,
        checkpoint_host_gb=None,
        state_staging_pages=None,
        provenance="live",
    )


def test_every_variable_is_read():
    settings = load_settings(
        {
            HICACHE: "1",
            STRIDE: "4",
            POLICY: "grid",
            HOST_GB: "2.5",
            STAGING: "32",
            PROVENANCE: "strict",
        }
    )
    assert settings == Settings(
        bit_exact_hicache=True,
        offload_page_stride=4,
        checkpoint_policy="grid",
        checkpoint_host_gb=2.5,
        state_staging_pages=32,
        provenance="strict",
    )


@pytest.mark.parametrize("text", ["1", "true", "YES", " y "])
def test_on(text):
    assert load_settings({HICACHE: text}).bit_exact_hicache is True


@pytest.mark.parametrize("text", ["0", "False", "no", "n", ""])
def test_off(text):
    assert load_settings({HICACHE: text}).bit_exact_hicache is False


@pytest.mark.parametrize(
    ("name", "value"),
    [*BAD.items(), (STRIDE, "-1"), (STRIDE, "two"), (HOST_GB, "0"), (HOST_GB, "nan")],
)
def test_a_bad_value_is_named(name, value):
    with pytest.raises(ConfigError) as caught:
        load_settings({name: value})
    (reason,) = caught.value.reasons
    assert reason.startswith(f"{name}={value!r} is not allowed: it must be ")
    assert reason.endswith("; correct it or unset it")


def test_all_bad_values_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        load_settings(BAD)
    assert [reason.partition("=")[0] for reason in caught.value.reasons] == list(BAD)


def test_a_name_that_does_not_exist_is_named_with_the_nearest():
    others = "REFERENCE_ENGINE REFERENCE_DEVICE NIGHTLY_MODEL ENV_ROOT PYTHON".split()
    # A Service of Kubernetes named sglang-unified-kv, and one named sglang-unified-kv-eu.
    others += (
        "SERVICE_HOST SERVICE_PORT_HTTP PORT PORT_30000_TCP_ADDR EU_SERVICE_PORT EU_PORT".split()
    )
    environ = {f"SGLANG_UNIFIED_KV_{name}": "x" for name in others}
    assert load_settings(environ | {"SGLANG_UNIFIED_KV_NOTHING": ""}) == load_settings({})
    with pytest.raises(ConfigError) as error:
        load_settings({"SGLANG_UNIFIED_KV_CHECKPOINT_HOST": "3", POLICY: "gird"})
    unknown, bad = error.value.reasons
    assert unknown.startswith("SGLANG_UNIFIED_KV_CHECKPOINT_HOST='3': there is no such variable;")
    assert f"did you mean {HOST_GB}?" in unknown and bad.startswith(f"{POLICY}='gird'")
    with pytest.raises(ConfigError) as error:
        load_settings({f"SGLANG_UNIFIED_KV_{name}": "1" for name in ("PYTHONS", "ENV_ROOTS", "AB")})
    names = [reason.removeprefix("SGLANG_UNIFIED_KV_") for reason in error.value.reasons]
    said = "there is no such variable; unset it"
    assert names == [f"AB='1': {said}", f"ENV_ROOTS='1': {said}", f"PYTHONS='1': {said}"]


def test_the_names_that_the_entry_point_knows_are_those_of_the_settings():
    ours = [v.name for v in variables() if v.name.startswith(names.PREFIX)]
    assert sorted(names.SETTINGS) == sorted(ours)


def test_every_name_that_code_and_scripts_read_is_known():
    root = Path(__file__).parents[2]
    files = [f for top in ("python", "scripts") for f in (root / top).rglob("*") if f.is_file()]
    text = "".join(file.read_text() for file in files if file.suffix in ("", ".py"))
    read = set(re.findall(r"SGLANG_UNIFIED_KV_[A-Z_]*[A-Z]", text))
    assert {"SGLANG_UNIFIED_KV_REFERENCE_DEVICE", "SGLANG_UNIFIED_KV_NIGHTLY_MODEL"} <= read
    assert names.unknown_variables(dict.fromkeys(read, "1")) == []
    (said,) = names.unknown_variables({"SGLANG_UNIFIED_KV_REFERENCE_ENGIN": "1"})
    assert said.startswith("SGLANG_UNIFIED_KV_REFERENCE_ENGIN='1': there is no such variable")


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv(STRIDE, "8")
    assert load_settings().offload_page_stride == 8
    assert Settings().offload_page_stride is None


def test_frozen():
    with pytest.raises(pydantic.ValidationError):
        load_settings({}).provenance = "strict"


def test_every_field_is_documented():
    for name, info in Settings.model_fields.items():
        assert "Default:" in info.description, name
    for name in ("offload_page_stride", "checkpoint_host_gb", "state_staging_pages"):
        assert "Unit:" in Settings.model_fields[name].description, name
