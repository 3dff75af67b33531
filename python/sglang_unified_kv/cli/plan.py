"""``sglang-unified-kv plan``: what fits on a machine, from SGLang's own sizes."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..config import BIT_EXACT_HICACHE, RING_FIXES, load_settings
from ..ring.capacity import GB, Machine, Sizes, checkpoints, first_limits, prompts, warnings
from .extra import require_extra

PRODUCT_SWITCHES = (BIT_EXACT_HICACHE, RING_FIXES)


def plan(
    launch_flags: Annotated[
        list[str], typer.Argument(metavar="-- LAUNCH FLAGS", help="As for sglang.launch_server.")
    ],
    hbm_gb: Annotated[float, typer.Option(min=1, help="Memory of one GPU, 1e9 bytes.")],
    weights_gb: Annotated[
        float, typer.Option(min=0, help="Weights and what else is resident on one GPU, 1e9 bytes.")
    ],
    host_gb: Annotated[
        float, typer.Option(min=1, help="Host memory free for one rank's caches, 1e9 bytes.")
    ],
    prompt_tokens: Annotated[
        int, typer.Option(min=257, help="Length of the prompts to be counted.")
    ] = 50_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture of capacity over slots and stride here.")
    ] = None,
) -> None:
    """Print what a rank of DeepSeek-V4 on unified KV holds, and what runs out first.

    Bytes and capacities come from the functions that size the real pools. Both switches count as on unless
    the environment sets them to 0. Needs SGLang and the model's config.json, no GPU.
    """
    from .doctor import _UPSTREAM_ERRORS

    try:
        planner, settings, fraction = _planner(list(launch_flags))
        machine = Machine(hbm_gb, weights_gb, host_gb)
        available = machine.available(fraction)
        if available <= 0:
            raise typer.BadParameter(
                f"--weights-gb {weights_gb} leaves nothing of {hbm_gb} GB x --mem-fraction-static {fraction}"
            )
        sizes = planner.sizes(available, machine, settings)
        if plot is not None:
            _plot(plot, planner, machine, settings, available)
    except _UPSTREAM_ERRORS as error:
        raise typer.BadParameter(f"SGLang rejects this: {error}") from error
    report = _report(sizes, machine, available, prompt_tokens)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)


def _planner(flags: list[str]):
    """SGLang's sizer for these flags, in the state of a rank on ROCm."""
    os.environ["SGLANG_UNIFIED_KV_REFERENCE_ENGINE"] = "1"
    for switch in PRODUCT_SWITCHES:
        os.environ.setdefault(switch, "1")
    # SGLang tells its sizes as it goes, and we warn of what the report says.
    logging.disable(logging.WARNING)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    from .. import engage
    from ..edits.planning import Planner
    from ..edits.server_args import facts_of

    args = prepare_server_args([*flags, "--device", "cpu"])
    args.resolve_once()
    for flag, value, default in (
        ("--max-total-tokens", args.max_total_tokens, None),
        ("--pp-size", args.pp_size, 1),
    ):
        if value != default:
            raise typer.BadParameter(f"{flag} {value} is not planned yet; leave it out")
    settings = load_settings()
    engage.engage(settings, facts_of(args))
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    return Planner(args), settings, args.mem_fraction_static


def _report(sizes: Sizes, machine: Machine, available: int, length: int) -> dict[str, Any]:
    held = prompts(sizes, length)
    running, cached = first_limits(held)
    return asdict(sizes) | {
        "machine": asdict(machine),
        "available": available,
        "host_bytes": sizes.host_bytes,
        "prompt_tokens": length,
        "checkpoints_per_prompt": checkpoints(sizes, length),
        "prompts": held,
        "limits_running": running,
        "limits_cached": cached,
        "warnings": warnings(sizes, machine, available, length),
    }


def _print(report: dict[str, Any]) -> None:
    table = Table(title="One rank", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    ring, scaled = report["tokens"], report["tokens_scaled"]
    rows = [
        ("KV memory of the device", f"{report['available'] / GB:.2f} GB"),
        ("a cached token", f"{report['per_token']:.1f} bytes"),
        ("a request slot (rings, states)", f"{report['per_slot'] / 1e6:.2f} MB"),
        (
            f"{report['slots']} request slots",
            f"{report['fixed'] / GB:.2f} GB",
        ),
        ("checkpoint staging", f"{report['staging'] / GB:.2f} GB"),
        ("pools of cached tokens", f"{report['pools'] / GB:.2f} GB"),
        ("full tokens, window sized by tokens", f"{scaled:,}"),
        ("full tokens, window sized by slots", f"{ring:,} ({ring / max(scaled, 1) - 1:+.1%})"),
        ("a checkpoint", f"{report['per_checkpoint'] / 1e6:.3f} MB"),
        (
            f"checkpoints of a prompt of {report['prompt_tokens']:,} tokens ({report['policy']})",
            f"{report['checkpoints_per_prompt']}, "
            f"{report['checkpoints_per_prompt'] * report['per_checkpoint'] / 1e6:,.1f} MB",
        ),
        *(
            (f"host memory: {name}", f"{size / GB:.2f} GB")
            for name, size in report["host_bytes"].items()
        ),
        ("host memory in all", f"{sum(report['host_bytes'].values()) / GB:.2f} GB"),
        *(
            (f"prompts of {report['prompt_tokens']:,} tokens: {name}", f"{count:,}")
            for name, count in report["prompts"].items()
        ),
        ("running requests are limited by", report["limits_running"]),
        ("cached prompts are limited by", report["limits_cached"] or "-"),
    ]
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    for line in report["warnings"]:
        console.print(f"[yellow]warning:[/yellow] {line}")


def _plot(path: Path, planner, machine: Machine, settings, available: int) -> None:
    require_extra(Console(stderr=True), "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    asked = planner.configurator.requested_max_running_requests_per_worker or 256
    counts = sorted({max(asked * step // 8, 1) for step in range(1, 17)})
    found = [planner.sizes(available, machine, settings, running=count) for count in counts]
    left.plot(counts, [s.tokens / 1e6 for s in found], label="window sized by slots")
    left.plot(counts, [s.tokens_scaled / 1e6 for s in found], label="window sized by tokens")
    left.axvline(asked, color="grey", linewidth=0.8)
    left.set(
        xlabel="max running requests of a rank", ylabel="full tokens, millions", ylim=(0, None)
    )
    left.legend()
    strides = (1, 2, 4, 8, 16)
    one = planner.sizes(available, machine, settings, running=asked)
    needed = [one.host_pages // stride * one.per_checkpoint / GB for stride in strides]
    pages = sum(one.host_page.values()) * one.host_pages / GB
    right.bar([str(s) for s in strides], needed, label="a checkpoint at every boundary")
    right.axhline(pages, color="grey", linewidth=0.8, label="HiCache's pages")
    right.axhline(machine.host_gb, color="red", linewidth=0.8, label="host memory")
    right.set(xlabel="stride, pages", ylabel="host memory, GB")
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
