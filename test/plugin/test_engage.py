"""The decision: every condition, every obstacle, and what is recorded and said."""

import warnings
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch_facts import GOOD
from sglang_unified_kv import engage
from sglang_unified_kv.config import BIT_EXACT_HICACHE, BIT_EXACT_RADIX, Settings
from sglang_unified_kv.engage import Decision, Facts, Refused, State, decide

ON = Settings(bit_exact_hicache=True)
RADIX = Settings(bit_exact_radix=True)
BOTH = Settings(bit_exact_hicache=True, bit_exact_radix=True)
OFF = Settings()

# A bad value of one fact, and what its line has to name.
MISSING = [
    (dict(is_hip=False), "ROCm"),
    (dict(flashmla_backend="auto"), "SGLANG_HACK_FLASHMLA_BACKEND is 'auto'"),
    (dict(architecture="LlamaForCausalLM"), "DeepSeek-V4 model (the architecture is 'LlamaFor"),
    (dict(model_type="deepseek_v41"), "model type 'deepseek_v41'"),
    (dict(enable_hierarchical_cache=False), "--enable-hierarchical-cache"),
]
OBSTACLES = [
    (dict(unified_kv_gate=False), "sglang_unified_kv_reference"),
    (dict(compress_state_dtype="bfloat16"), "SGLANG_DSV4_COMPRESS_STATE_DTYPE=bfloat16"),
    (dict(hicache_write_policy="write_back"), "--hicache-write-policy write_back"),
    (
        dict(hicache_write_policy="write_through_selective"),
        "--hicache-write-policy write_through_selective: set it to write_through",
    ),
    (dict(hicache_host_memory_mode="buffer_only"), "--hicache-host-memory-mode buffer_only"),
    (dict(hicache_host_memory_fraction=0.8), "--hicache-ratio is not given: SGLang then sizes"),
    (dict(hicache_ratio=0.0), "--hicache-ratio 0.0: leaves no host page"),
    (dict(hicache_size=90), "--hicache-size 90: SGLang does not size HiCache of DeepSeek-V4 in GB"),
    (
        dict(hicache_mem_layout="page_head"),
        "--hicache-io-backend direct with --hicache-mem-layout page_head",
    ),
    (
        dict(hicache_io_backend="kernel_ascend"),
        "--hicache-io-backend kernel_ascend with --hicache-mem-layout page_first_direct",
    ),
    (
        dict(enable_lora=True, hicache_storage_backend="file"),
        "--enable-lora (--lora-paths sets it) with a storage backend",
    ),
    (
        dict(hicache_storage_backend="simm"),
        "--hicache-storage-backend simm: not supported, it has no batch_exists_v2",
    ),
    (
        dict(hicache_storage_backend="hf3fs"),
        "--hicache-storage-backend hf3fs: not supported, its transfers were never tried",
    ),
    (dict(hicache_storage_backend="sim"), "it simulates hits without bytes; use one of file, nixl"),
    (
        dict(storage_config_error="{: it is no JSON"),
        "--hicache-storage-backend-extra-config: {: it is no JSON; correct it",
    ),
    (dict(disable_radix_cache=True), "--disable-radix-cache"),
    (dict(radix_cache_backend="mine"), "--radix-cache-backend mine"),
    (dict(enable_lmcache=True), "--enable-lmcache"),
    (dict(enable_flexkv=True), "--enable-flexkv"),
    (dict(enable_unified_cache_external_linker=True), "--enable-unified-cache-external-linker"),
    (dict(page_size=64), "--page-size 64"),
    (dict(attention_backends=("dsv4", "triton")), "('dsv4', 'triton')"),
    (dict(dsv4_attn_backend="trtllm"), "--dsv4-attn-backend trtllm"),
    (dict(enable_unified_memory=True), "--enable-unified-memory"),
    (dict(enable_hisparse=True), "--enable-hisparse"),
    (dict(pp_size=2), "--pp-size 2"),
    (dict(attn_cp_size=2), "--attn-cp-size 2"),
    (dict(dcp_size=2), "--dcp-size 2"),
    (dict(enable_prefill_cp=True), "--enable-prefill-cp"),
    (dict(enable_two_batch_overlap=True), "--enable-two-batch-overlap"),
    (dict(enable_pdmux=True), "--enable-pdmux"),
    (dict(disaggregation_mode="prefill"), "--disaggregation-mode prefill"),
    (dict(disaggregation_mode="decode"), "--disaggregation-mode decode"),
    (
        dict(speculative_algorithm="EAGLE", enable_mixed_chunk=True),
        "--enable-mixed-chunk with --speculative-algorithm EAGLE",
    ),
    (dict(speculative_algorithm="NGRAM"), "--speculative-algorithm NGRAM"),
    (dict(speculative_eagle_topk=4), "--speculative-eagle-topk 4"),
    (dict(speculative_adaptive=True), "--speculative-adaptive"),
    (dict(enable_multi_layer_eagle=True), "--enable-multi-layer-eagle"),
    (dict(dllm_algorithm="LowConfidence"), "--dllm-algorithm LowConfidence"),
    (dict(enable_streaming_session=True), "--enable-streaming-session"),
    (dict(enable_session_radix_cache=True), "--enable-session-radix-cache"),
    (dict(enable_encoder_swa_bounded_replay=True), "--enable-encoder-swa-bounded-replay"),
    (dict(enable_decoder_swa_bounded_replay=True), "--no-enable-decoder-swa-bounded-replay"),
    (dict(encoder_only=True), "--encoder-only"),
    (dict(use_ray=True), "--use-ray"),
    (dict(taken_labels="state, tier"), "--extra-metric-labels sets state, tier, which metrics of"),
    (
        dict(cuda_graph_backend_prefill="breakable"),
        "--cuda-graph-backend-prefill breakable: set it to disabled",
    ),
]


@pytest.fixture(autouse=True)
def forget():
    yield
    engage.reset()


def test_engaged():
    assert decide(ON, GOOD) == Decision(State.ENGAGED)
    eagle = replace(GOOD, speculative_algorithm="EAGLE", speculative_eagle_topk=1)
    assert decide(ON, eagle) == Decision(State.ENGAGED)
    assert decide(ON, replace(GOOD, enable_mixed_chunk=True)) == Decision(State.ENGAGED)
    reference = replace(GOOD, is_hip=False, reference_engine=True, compress_state_dtype="fp32")
    assert decide(ON, reference) == Decision(State.ENGAGED)


@pytest.mark.parametrize(("bad", "named"), MISSING)
def test_missing_condition_makes_inert(bad, named):
    decision = decide(ON, replace(GOOD, **bad))
    assert decision.state is State.INERT and not decision.obstacles
    (line,) = decision.missing
    assert named in line


@pytest.mark.parametrize(("bad", "named"), OBSTACLES)
def test_obstacle_refuses(bad, named):
    decision = decide(ON, replace(GOOD, **bad))
    assert decision.state is State.REFUSED and not decision.missing
    (line,) = decision.obstacles
    assert named in line and "\n" not in line


def test_everything_is_named_at_once():
    missing = replace(GOOD, **{k: v for bad, _ in MISSING for k, v in bad.items()})
    assert len(decide(ON, missing).missing) == 4
    merged = {k: v for bad, _ in OBSTACLES for k, v in bad.items()}
    # The two of one pair share a rule.
    assert len(decide(ON, replace(GOOD, **merged)).obstacles) == len(merged) - 1


def test_every_rule_and_every_fact_has_a_case_here():
    cases = [bad for bad, _ in MISSING + OBSTACLES]
    rules = (
        engage.ENVIRONMENT_CONDITIONS
        + engage.LAUNCH_CONDITIONS
        + (engage.TIER_CONDITIONS[BIT_EXACT_HICACHE],)
        + engage.ENVIRONMENT_OBSTACLES
        + engage.LAUNCH_OBSTACLES
    )
    for rule in rules:
        assert any(not rule.ok(replace(GOOD, **bad)) for bad in cases), rule.otherwise
    # The last is HiSparse's.
    named = {name for bad in cases for name in bad} | {"reference_engine", "hisparse_config_error"}
    assert named == {field.name for field in fields(Facts)}


def test_a_gate_that_is_off_for_want_of_a_condition_is_no_obstacle():
    facts = replace(GOOD, is_hip=False, unified_kv_gate=False)
    assert engage.violations(engage.ENVIRONMENT_OBSTACLES, facts) == ()


def any_facts():
    bad = [case for case, _ in MISSING + OBSTACLES]
    return st.lists(st.sampled_from(bad), max_size=6).map(
        lambda chosen: replace(GOOD, **{k: v for case in chosen for k, v in case.items()})
    )


@given(any_facts())
def test_property_conditions_first_and_never_engaged_with_an_obstacle(facts):
    conditions = engage.ENVIRONMENT_CONDITIONS + engage.LAUNCH_CONDITIONS
    conditions += (engage.TIER_CONDITIONS[BIT_EXACT_HICACHE],)
    obstacles = engage.ENVIRONMENT_OBSTACLES + engage.LAUNCH_OBSTACLES
    decision = decide(ON, facts)
    if not all(rule.ok(facts) for rule in conditions):
        assert decision.state is State.INERT
    else:
        clear = all(rule.ok(facts) for rule in obstacles)
        assert decision.state is (State.ENGAGED if clear else State.REFUSED)
    assert decide(OFF, facts) == Decision(State.INERT)


@pytest.mark.parametrize("hicache", [True, False])
def test_each_switch_engages_on_its_side_of_hicache(hicache):
    facts = replace(GOOD, enable_hierarchical_cache=hicache)
    assert decide(BOTH, facts).state is State.ENGAGED
    assert decide(ON if hicache else RADIX, facts).state is State.ENGAGED
    decision = decide(RADIX if hicache else ON, facts)
    assert decision.state is State.INERT
    (line,) = decision.missing
    assert "--enable-hierarchical-cache" in line
    assert (BIT_EXACT_HICACHE if hicache else BIT_EXACT_RADIX) in line


def test_what_only_hicache_asks_for_does_not_stand_in_the_way_without_it():
    facts = replace(
        GOOD,
        enable_hierarchical_cache=False,
        hicache_write_policy="write_back",
        hicache_host_memory_mode="buffer_only",
        hicache_host_memory_fraction=0.8,
        hicache_ratio=0.0,
        hicache_size=90,
        hicache_io_backend="kernel_ascend",
        hicache_mem_layout="page_head",
    )
    assert decide(RADIX, facts).state is State.ENGAGED


def test_adapters_are_served_where_nothing_is_stored():
    assert decide(ON, replace(GOOD, enable_lora=True)).state is State.ENGAGED


def test_a_refusal_names_the_switches_that_are_on():
    facts = replace(GOOD, use_ray=True)
    with pytest.raises(Refused, match=f"{BIT_EXACT_HICACHE}=1 and {BIT_EXACT_RADIX}=1 cannot"):
        engage.engage(BOTH, facts)


def test_off_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engage.engage(OFF, GOOD) == Decision(State.INERT)
    assert engage.current() is None


def test_inert_warns_once_with_all_that_is_missing():
    facts = replace(GOOD, is_hip=False, enable_hierarchical_cache=False)
    with pytest.warns(RuntimeWarning) as caught:
        engage.engage(ON, facts)
    (warning,) = caught
    assert "ROCm" in str(warning.message)
    assert "--enable-hierarchical-cache" in str(warning.message)
    assert engage.current() is None


def test_a_rank_does_not_repeat_the_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engage.engage(ON, replace(GOOD, is_hip=False), announce=False)


def test_refused_carries_every_reason():
    facts = replace(GOOD, page_size=64, use_ray=True)
    with pytest.raises(Refused) as caught:
        engage.engage(ON, facts)
    assert caught.value.reasons == decide(ON, facts).obstacles
    assert isinstance(caught.value, ValueError)
    for reason in caught.value.reasons:
        assert f"\n  - {reason}" in str(caught.value)


def test_the_operator_is_told_what_was_asked_for_and_no_defaults(caplog):
    asked = ON.model_copy(update={"checkpoint_host_gb": 3.0})
    with caplog.at_level("INFO"):
        engage.engage(asked, GOOD)
    said = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE=True SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB=3.0"
    assert caplog.messages == [f"Bit-exact HiCache is engaged: {said}"]


def test_engagement_is_recorded_and_replaced():
    engage.engage(ON, GOOD)
    assert engage.current() == engage.Engagement(ON, Decision(State.ENGAGED))
    with pytest.raises(Refused):
        engage.engage(ON, replace(GOOD, use_ray=True))
    assert engage.current() is None
    engage.engage(ON, GOOD)
    engage.engage(OFF, GOOD)
    assert engage.current() is None
    engage.engage(ON, GOOD)
    engage.reset()
    assert engage.current() is None


@pytest.mark.parametrize("pair", engage.HOST_COPIES)
def test_layouts_that_sglang_copies_engage(pair):
    backend, layout = pair
    facts = replace(GOOD, hicache_io_backend=backend, hicache_mem_layout=layout)
    assert decide(ON, facts).state is State.ENGAGED


@pytest.mark.parametrize("backend", [None, *engage.STORAGE_BACKENDS])
def test_storage_backends_that_carry_records_engage(backend):
    assert decide(ON, replace(GOOD, hicache_storage_backend=backend)).state is State.ENGAGED


def test_every_storage_backend_of_sglang_is_decided_by_name():
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    names = set(StorageBackendFactory._registry) | {"dynamic"}
    assert set(engage.STORAGE_BACKENDS) <= names
    for name in names - set(engage.STORAGE_BACKENDS):
        assert f"--hicache-storage-backend {name}: not supported" in engage.storage_obstacle(name)
