"""Whether HiSparse engages: every condition, every obstacle; and SGLang's own arguments."""

from dataclasses import replace

import launch_facts
import pytest
from sglang_unified_kv import engage
from sglang_unified_kv.config import Settings
from sglang_unified_kv.engage import State
from sglang_unified_kv.hisparse.support import CONDITIONS, OBSTACLES, config_error, decide

ON, OFF = Settings(hisparse=True), Settings()
GOOD = replace(
    launch_facts.GOOD,
    enable_hierarchical_cache=False,
    enable_hisparse=True,
    disable_radix_cache=True,
)
MISSING = [
    (dict(is_hip=False), "ROCm"),
    (dict(flashmla_backend="triton"), "SGLANG_HACK_FLASHMLA_BACKEND is 'triton'"),
    (dict(architecture="LlamaForCausalLM"), "the architecture is 'LlamaFor"),
    (dict(enable_hisparse=False), "--enable-hisparse"),
]
IN_THE_WAY = [
    (dict(unified_kv_gate=False), "sglang_unified_kv_reference"),
    (dict(disable_radix_cache=False), "add --disable-radix-cache"),
    (dict(page_size=128), "--page-size 128"),
    (dict(speculative_algorithm="EAGLE"), "--speculative-algorithm EAGLE"),
    (dict(hisparse_config_error="a: no"), "--hisparse-config a: no"),
    (dict(disaggregation_mode="decode"), "--disaggregation-mode decode"),
    (dict(dsv4_attn_backend="trtllm"), "--dsv4-attn-backend trtllm"),
    (dict(enable_unified_memory=True), "--enable-unified-memory"),
    (dict(pp_size=2), "--pp-size 2"),
    (dict(attn_cp_size=2), "--attn-cp-size 2"),
    (dict(dcp_size=2), "--dcp-size 2"),
    (dict(enable_prefill_cp=True), "--enable-prefill-cp"),
    (dict(enable_two_batch_overlap=True), "--enable-two-batch-overlap"),
    (dict(enable_pdmux=True), "--enable-pdmux"),
    (dict(enable_streaming_session=True), "--enable-streaming-session"),
    (dict(enable_session_radix_cache=True), "--enable-session-radix-cache"),
    (dict(enable_encoder_swa_bounded_replay=True), "--enable-encoder-swa-bounded-replay"),
    (dict(enable_decoder_swa_bounded_replay=True), "--no-enable-decoder-swa-bounded-replay"),
    (dict(cuda_graph_backend_prefill="breakable"), "--cuda-graph-backend-prefill breakable"),
    (dict(use_ray=True), "--use-ray"),
    (dict(taken_labels="tier"), "--extra-metric-labels sets tier, which metrics of"),
]


@pytest.mark.parametrize("change, named", MISSING)
def test_a_missing_condition_leaves_sglang_as_it_is(change, named):
    decision = decide(ON, replace(GOOD, **change))
    assert decision.state is State.INERT and len(decision.missing) == 1
    assert named in decision.missing[0]


@pytest.mark.parametrize("change, named", IN_THE_WAY)
def test_an_obstacle_refuses_the_start(change, named):
    decision = decide(ON, replace(GOOD, **change))
    assert decision.state is State.REFUSED and len(decision.obstacles) == 1
    assert named in decision.obstacles[0]


@pytest.mark.parametrize(
    "text, named",
    [
        ("{", "--hisparse-config {: it is no JSON"),
        ("[1]", "--hisparse-config [1]: it is no JSON object"),
        (
            '{"top_k": 512, "device_buffer_size": 448}',
            "device_buffer_size=448: it is below top_k=512",
        ),
        ('{"top_k": 64, "device_buffer_size": 448}', "--hisparse-config device_buffer_size=448"),
        (
            '{"top_k": 512, "device_buffer_size": 600}',
            "device_buffer_size=600: it must be a multiple",
        ),
        ('{"top_k": "a"}', '--hisparse-config top_k="a": it must be an integer'),
        ('{"top_k": null}', "--hisparse-config top_k=null: it must be an integer"),
        ('{"device_buffer_size": 1.5}', "--hisparse-config device_buffer_size=1.5: it must be an"),
        ('{"host_to_device_ratio": 1.5}', "--hisparse-config host_to_device_ratio=1.5"),
        (None, ""),
        ('{"top_k": 512, "device_buffer_size": 512, "host_to_device_ratio": 3}', ""),
    ],
)
def test_a_config_that_nothing_can_be_built_from_is_told_before_the_weights(text, named):
    found = config_error(text, index_topk=512, page_size=256)
    assert named in found and bool(named) == bool(found)


def test_every_rule_has_a_case():
    for rules, cases in ((CONDITIONS, MISSING), (OBSTACLES, IN_THE_WAY)):
        for rule in rules:
            assert any(not rule.ok(replace(GOOD, **bad)) for bad, _ in cases), rule.otherwise


def test_engaged_and_off():
    assert decide(ON, GOOD).state is State.ENGAGED
    assert decide(ON, replace(GOOD, is_hip=False, reference_engine=True)).state is State.ENGAGED
    assert decide(OFF, GOOD) == engage.Decision(State.INERT)


def arguments(model_path, **options):
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=str(model_path), device="cpu", page_size=256, skip_tokenizer_init=True, **options
    )
    args.resolve_once()
    args.check_server_args()
    return args


class Rocm:
    """SGLang's platform as its HiSparse validation sees it."""

    is_hip = True


@pytest.fixture
def on_rocm(monkeypatch):
    monkeypatch.setattr("sglang.srt.arg_groups.hisparse_hook.get_platform", Rocm)


@pytest.fixture
def switch(monkeypatch):
    monkeypatch.setenv("SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE", "0")
    return lambda value: monkeypatch.setenv("SGLANG_UNIFIED_KV_HISPARSE", value)


HISPARSE = {"enable_hisparse": True, "disable_radix_cache": True}
WORDS = "--enable-hisparse is not supported with the unified-KV path on ROCm"


def test_off_keeps_sglangs_refusal(model_path, on_rocm, switch):
    switch("0")
    with pytest.raises(ValueError, match=WORDS):
        arguments(model_path, **HISPARSE)


def test_on_lifts_it(model_path, on_rocm, switch):
    switch("1")
    assert arguments(model_path, **HISPARSE).enable_hisparse
    from sglang.srt.layers.attention.dsv4.unified_kv_gate import is_unified_kv_triton

    assert is_unified_kv_triton()


@pytest.mark.parametrize(
    "options, ours, theirs",
    [
        ({"disable_radix_cache": False}, "add --disable-radix-cache", "requires --disable-radix-"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode", WORDS),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap: not", WORDS),
    ],
)
def test_what_is_not_supported_keeps_sglangs_words(
    model_path, on_rocm, switch, options, ours, theirs
):
    switch("1")
    with pytest.raises(engage.Refused) as refused:
        arguments(model_path, **(HISPARSE | options))
    assert ours in str(refused.value) and theirs in str(refused.value)


def test_sglangs_other_checks_stay(model_path, on_rocm, switch):
    switch("1")
    with pytest.raises(ValueError, match="--enable-mixed-chunk"):
        arguments(model_path, **HISPARSE, enable_mixed_chunk=True)


def test_on_without_the_flag_says_so(model_path, switch):
    switch("1")
    with pytest.warns(RuntimeWarning, match="SGLANG_UNIFIED_KV_HISPARSE=1 has no effect.*--enable"):
        arguments(model_path)
