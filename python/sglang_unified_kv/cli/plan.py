"""``sglang-unified-kv plan``: what fits on a machine, from SGLang's own sizes."""

from __future__ import annotations

import json
import logging
import os
import warnings as python_warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..config import BIT_EXACT_HICACHE, CHECKPOINT_HOST_GB, HISPARSE, RING_FIXES, load_settings
from ..ring.capacity import (
    GB,
    Machine,
    Sizes,
    best_split,
    checkpoints,
    first_limits,
    prompts,
    warnings,
)
from .extra import require_extra

PRODUCT_SWITCHES = (BIT_EXACT_HICACHE, RING_FIXES, HISPARSE)


def plan(
    launch_flags: Annotated[
        list[str], typer.Argument(metavar="-- LAUNCH FLAGS", help="As for sglang.launch_server.")
    ],
    hbm_gb: Annotated[
        float, typer.Option(min=1, help="Memory of one GPU, 1e9 bytes: 288 GiB are 309.")
    ],
    weights_gb: Annotated[
        float,
        typer.Option(
            min=0,
            help="Weights and what else is resident on one GPU (of the fullest stage), 1e9 bytes: 1.074 "
            "times the GB of SGLang's log.",
        ),
    ],
    host_gb: Annotated[
        float, typer.Option(min=1, help="Host memory free for one rank's caches, 1e9 bytes.")
    ],
    prompt_tokens: Annotated[
        int, typer.Option(min=257, help="Length of the prompts to be counted.")
    ] = 50_000,
    new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that each of them generates.")
    ] = 1_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture of capacity over slots and stride here.")
    ] = None,
) -> None:
    """Print what a rank of DeepSeek-V4 on unified KV holds, and what runs out first.

    Bytes and capacities come from the functions that size the real pools. The switches for exact reuse, ring
    accounting and HiSparse count as on unless the environment sets them to 0; our other variables count as
    they are set. Needs SGLang and the model's config.json, no GPU.
    """
    from .doctor import _UPSTREAM_ERRORS

    try:
        planner, settings, args = _planner(list(launch_flags))
        fraction = args.mem_fraction_static
        if fraction is None:
            raise typer.BadParameter(
                "--mem-fraction-static is not given, and SGLang derives it from a GPU that is not here: give "
                "it, as the server's log has it or, say, 0.85"
            )
        machine = Machine(hbm_gb, weights_gb, host_gb)
        available = machine.available(fraction)
        if available <= 0:
            raise typer.BadParameter(
                f"--weights-gb {weights_gb} leaves nothing of {hbm_gb} GB x --mem-fraction-static {fraction}"
            )
        sizes = planner.sizes(available, machine, settings, most=args.max_total_tokens)
        if plot is not None:
            _plot(plot, planner, machine, settings, available, args.max_total_tokens)
    except _UPSTREAM_ERRORS as error:
        raise typer.BadParameter(f"SGLang rejects this: {error}") from error
    report = _report(sizes, machine, available, prompt_tokens, new_tokens)
    given = {flag.partition("=")[0] for flag in launch_flags}
    if sizes.staging and "--chunked-prefill-size" not in given:
        report["warnings"].append(
            "--chunked-prefill-size is not given, and SGLang chooses it by the GPU: give your server's, for "
            "checkpoint staging depends on it"
        )
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)


def _planner(flags: list[str]):
    """SGLang's sizer for these flags, in the state of a rank on ROCm."""
    os.environ["SGLANG_UNIFIED_KV_REFERENCE_ENGINE"] = "1"
    for switch in PRODUCT_SWITCHES:
        if not os.environ.get(switch):
            os.environ[switch] = "1"
            # Nobody asked for it, so nobody misses it where the flags leave it without effect.
            python_warnings.filterwarnings("ignore", f"{switch}=1 has no effect", RuntimeWarning)
    # SGLang tells its sizes as it goes, and we warn of what the report says.
    logging.disable(logging.WARNING)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.arg_groups.hisparse_hook import validate_hisparse
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import is_gfx95_supported

    from .. import engage
    from ..edits.planning import Planner
    from ..edits.server_args import facts_of

    args = prepare_server_args([*flags, "--device", "cpu"])
    if args.enable_deepseek_v4_fp4_indexer and not is_gfx95_supported():
        raise typer.BadParameter(
            "--enable-deepseek-v4-fp4-indexer is True: SGLang knows the size of fp4 indexer keys on a gfx95 "
            "GPU alone. Plan there, or leave the flag out: keys of 132 bytes instead of 68 are counted then, "
            "so fewer tokens than will fit"
        )
    args.resolve_once()
    settings = load_settings()
    if args.enable_hisparse and not settings.hisparse:
        raise typer.BadParameter(
            f"--enable-hisparse while {HISPARSE} is off: SGLang refuses it on unified KV"
        )
    validate_hisparse(args)
    engage.engage(settings, facts_of(args))
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    return Planner(args), settings, args


def _report(
    sizes: Sizes, machine: Machine, available: int, length: int, new: int
) -> dict[str, Any]:
    held = prompts(sizes, length, new)
    running, cached = first_limits(held)
    found, split = asdict(sizes), best_split(sizes, machine, length, new)
    if sizes.hisparse:
        found["hisparse"] |= sizes.hisparse.figures(length)
    return found | {
        "machine": asdict(machine),
        "available": available,
        "host_bytes": sizes.host_bytes,
        "prompt_tokens": length,
        "new_tokens": new,
        "checkpoints_per_request": checkpoints(sizes, length, new),
        "prompts": held,
        "limits_running": running,
        "limits_cached": cached,
        "best_split": asdict(split) if split else None,
        "warnings": warnings(sizes, machine, available, length, new),
    }


def _print(report: dict[str, Any]) -> None:
    table = Table(title="One rank", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    ring, scaled = report["tokens"], report["tokens_scaled"]
    first, end = report["layers"]
    request = f"{report['prompt_tokens']:,} + {report['new_tokens']:,} tokens"
    in_a_slot = "rings, states, tables" if report["hisparse"] else "rings, states"
    rows = [
        ("layers", f"{first} to {end - 1}"),
        ("KV memory of the device", f"{report['available'] / GB:.2f} GB"),
        ("a cached token", f"{report['per_token']:.1f} bytes"),
        (f"a request slot ({in_a_slot})", f"{report['per_slot'] / 1e6:.2f} MB"),
        (
            f"{report['slots']} request slots",
            f"{report['fixed'] / GB:.2f} GB",
        ),
        ("checkpoint staging", f"{report['staging'] / GB:.2f} GB"),
        ("pools of cached tokens", f"{report['pools'] / GB:.2f} GB"),
        ("full tokens, window sized by tokens", f"{scaled:,}"),
        ("full tokens, window sized by slots", f"{ring:,} ({ring / max(scaled, 1) - 1:+.1%})"),
        *(
            _hisparse_rows(report)
            if report["hisparse"]
            else [
                ("a checkpoint", f"{report['per_checkpoint'] / 1e6:.3f} MB"),
                (
                    f"checkpoints of {request} ({report['policy']})",
                    f"{report['checkpoints_per_request']}, "
                    f"{report['checkpoints_per_request'] * report['per_checkpoint'] / 1e6:,.1f} MB",
                ),
            ]
        ),
        *(
            (f"host memory: {name}", f"{size / GB:.2f} GB")
            for name, size in report["host_bytes"].items()
        ),
        ("host memory in all", f"{sum(report['host_bytes'].values()) / GB:.2f} GB"),
        *((f"{request}: {name}", f"{count:,}") for name, count in report["prompts"].items()),
        ("running requests are limited by", report["limits_running"]),
        ("cached prompts are limited by", report["limits_cached"] or "-"),
    ]
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    if best := report["best_split"]:
        console.print(
            f"{report['machine']['host_gb']:g} GB of host memory hold {best['prompts']:,} such prompts at "
            f"most: --hicache-ratio {best['hicache_ratio']:g}, "
            f"{CHECKPOINT_HOST_GB}={best['checkpoint_host_gb']:g}"
        )
    for line in report["warnings"]:
        console.print(f"[yellow]warning:[/yellow] {line}")


def _hisparse_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    found = report["hisparse"]
    prompt = f"prompts of {report['prompt_tokens']:,} tokens"
    return [
        ("HiSparse: host_to_device_ratio", f"{found['ratio']}"),
        ("HiSparse: tables of the request slots", f"{found['tables'] / GB:.2f} GB"),
        ("HiSparse: device C4 rows of a layer", f"{found['rows']:,}"),
        ("HiSparse: a hot buffer", f"{found['hot_buffer_rows']:,} rows"),
        ("HiSparse: longest sequence", f"{found['longest_sequence']:,} tokens"),
        (f"HiSparse: hot buffers, {prompt}", f"{found['hot_buffers']:,}"),
        (f"HiSparse: computed at once, {prompt}", f"{found['prefills']:,}"),
    ]


def _plot(path: Path, planner, machine: Machine, settings, available: int, most) -> None:
    require_extra(Console(stderr=True), "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    asked = planner.stages[0].requested_max_running_requests_per_worker or 256
    counts = sorted({max(asked * step // 8, 1) for step in range(1, 17)})
    found = [
        planner.sizes(available, machine, settings, running=count, most=most) for count in counts
    ]
    left.plot(counts, [s.tokens / 1e6 for s in found], label="window sized by slots")
    left.plot(counts, [s.tokens_scaled / 1e6 for s in found], label="window sized by tokens")
    left.axvline(asked, color="grey", linewidth=0.8)
    left.set(
        xlabel="max running requests of a rank", ylabel="full tokens, millions", ylim=(0, None)
    )
    left.legend()
    if found[0].hisparse:
        cold = [s.hisparse.cold_bytes / GB for s in found]
        right.plot(counts, cold, label="cold C4 rows")
        right.set(xlabel="max running requests of a rank", ylim=(0, None))
    else:
        _plot_strides(right, planner.sizes(available, machine, settings, running=asked, most=most))
    right.axhline(machine.host_gb, color="red", linewidth=0.8, label="host memory")
    right.set(ylabel="host memory, GB")
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_strides(axes, sizes: Sizes) -> None:
    """Host memory of the checkpoints over their stride, beside HiCache's pages."""
    strides = (1, 2, 4, 8, 16)
    needed = [sizes.host_pages // stride * sizes.per_checkpoint / GB for stride in strides]
    pages = sum(sizes.host_page.values()) * sizes.host_pages / GB
    axes.bar([str(s) for s in strides], needed, label="a checkpoint at every boundary")
    axes.axhline(pages, color="grey", linewidth=0.8, label="HiCache's pages")
    axes.set(xlabel="stride, pages")
