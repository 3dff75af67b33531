"""The Triton kernels: equal to their torch twins, and compiled for every target without its device."""

from pathlib import Path

import pytest
import torch
import triton
from programs import run_program
from sglang_unified_kv.checkpoint.capture import Capture
from sglang_unified_kv.checkpoint.layout import CheckpointLayout, Kind
from sglang_unified_kv.checkpoint.rings import Ring
from sglang_unified_kv.checkpoint.rows import ChunkPlaces, TritonRows
from sglang_unified_kv.kernels import rows, swap
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "gfx942": (GPUTarget("hip", "gfx942", 64), "hsaco"),
    "gfx950": (GPUTarget("hip", "gfx950", 64), "hsaco"),
    "sm_90": (GPUTarget("cuda", 90, 32), "ptx"),
}
RING = ["table", "slots", "ends", "staged", "staging"]
CHUNK_INTEGERS = ["chunk_stride", "ring_stride", "record_stride", "rows", "width"]
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8"}


def ring_source(to_staging):
    signature = dict.fromkeys(RING, "*i64") | {"record_words": "i32"}
    constants = {"TO_STAGING": to_staging, "BLOCK": 1024}
    signature |= dict.fromkeys(constants, "constexpr")
    return ASTSource(rows.move_ring_rows, signature, constants)


def chunk_source(chunk, ring):
    signature = {"chunk": POINTERS[chunk], "ring": POINTERS[ring], "section": POINTERS[ring]}
    signature |= dict.fromkeys(["chunk_index", "ring_index", "staged"], "*i64")
    signature |= dict.fromkeys(CHUNK_INTEGERS, "i32") | {"BLOCK": "constexpr"}
    return ASTSource(rows.gather_chunk_rows, signature, {"BLOCK": 1024})


def plan_source(step, hot=4096):
    types = {
        "*i32": [
            "top_k",
            "lengths",
            "real",
            "tokens",
            "locations",
            "stamps",
            "clocks",
            "victims",
            "out",
        ],
        "*i64": ["requests", "cold", "sources", "tally"],
        "*i16": ["places"],
        "i32": ["top_k_stride", "slot_stride", "positions", "out_stride", "miss_stride"],
    }
    types["*i32"] += ["targets", "counts"]
    constants = {"K": 1024, "HOT": hot, "K_BLOCK": 1024, "STEP": step.value}
    return source_of(swap.plan_swap, types, constants)


def copy_source(target_rows):
    types = {
        "*i64": ["sources", "targets", "source_rows"],
        "*i32": ["counts"],
        "i32": ["rows_stride", "first_layer", "row_words"],
    }
    types[target_rows].append("target_rows")
    return source_of(swap.copy_rows, types, {"BLOCK": 128, "ROWS": 4})


def source_of(kernel, types, constants):
    signature = {name: kind for kind, names in types.items() for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    return ASTSource(kernel, {n: signature[n] for n in kernel.arg_names}, constants)


SOURCES = {
    "rings to record": lambda: ring_source(True),
    "record to rings": lambda: ring_source(False),
    "chunk, bf16 window": lambda: chunk_source(torch.bfloat16, torch.bfloat16),
    "chunk, packed": lambda: chunk_source(torch.uint8, torch.uint8),
    "chunk, states": lambda: chunk_source(torch.float32, torch.float32),
    "chunk, states from bf16": lambda: chunk_source(torch.bfloat16, torch.float32),
    "swap plan": lambda: plan_source(swap.ALL),
    "swap plan, first launch": lambda: plan_source(swap.LOOK_UP),
    "swap plan, second launch": lambda: plan_source(swap.SWEEP),
    "swap plan, small buffer": lambda: plan_source(swap.SWEEP, hot=1024),
    "swap plan, third launch": lambda: plan_source(swap.PLACE),
    "rows from the host": lambda: copy_source("*i32"),
    "rows to the host": lambda: copy_source("*i64"),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_compiles(source, target):
    device, binary = TARGETS[target]
    compiled = triton.compile(SOURCES[source](), target=device)
    assert len(compiled.asm[binary]) > 1000


def test_every_kernel_is_listed():
    kernels = {
        name
        for module in (rows, swap)
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction)
    }
    assert kernels == {source().fn.__name__ for source in SOURCES.values()}


_PLACES = ChunkPlaces([Capture("r", 0, 256, 0, 0, 0)], [0], torch.device("cpu"))


def compare(where, cases):
    script = Path(__file__).with_name("rows_comparison.py")
    assert f"{2 * cases} cases equal" in run_program(script, where, cases)


@pytest.mark.parametrize("cases", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_equal_to_torch_in_the_interpreter(cases):
    compare("interpret", cases)


def test_rows_that_do_not_lie_together_are_refused():
    with pytest.raises(ValueError, match="cannot move rows"):
        Ring.of(Kind.WINDOW, 0, torch.zeros(128, 1024)[:, :512], 128)
    ring = Ring.of(Kind.WINDOW, 0, torch.zeros(4 * 128, 512), 128)
    layout = CheckpointLayout.of([ring.spec], page_size=256, window=128, overlap=4)
    staging = torch.zeros(1, layout.record_bytes, dtype=torch.uint8)
    moves = TritonRows(layout, [ring], staging)
    with pytest.raises(ValueError, match="rows of a chunk have stride"):
        moves.gather_chunk(0, torch.zeros(512, 300).t(), _PLACES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_equal_to_torch_on_a_gpu():
    compare("gpu", 300)
