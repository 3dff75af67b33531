"""What ``sglang-unified-kv plan`` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..launches import block
from ..plan.capacity import GB


def show(report: dict[str, Any]) -> None:
    """Print a report: the table, what was chosen, warnings, what would be refused, the launch line."""
    table = Table(title="One rank", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for row in _rows(report):
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    for text in report["notes"]:
        console.print(escape(text))
    for text in report["warnings"]:
        console.print(f"[yellow]warning:[/yellow] {escape(text)}")
    for text in report["refusals"]:
        console.print(f"[red]no:[/red] {escape(text)}")
    if report["launch"]:
        console.print()
        console.print(block(**report["launch"]), markup=False, soft_wrap=True)


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    ring, scaled = report["tokens"], report["tokens_scaled"]
    first, end = report["layers"]
    talk, ranks = report["conversation"]["name"], report["machine"]["ranks_per_host"]
    in_a_slot = "rings, states, tables" if report["hisparse"] else "rings, states"
    return [
        ("layers", f"{first} to {end - 1}"),
        ("KV memory of the device", f"{report['available'] / GB:.2f} GB"),
        ("a cached token", f"{report['per_token']:.1f} bytes"),
        (f"a request slot ({in_a_slot})", f"{report['per_slot'] / 1e6:.2f} MB"),
        (f"{report['slots']} request slots", f"{report['fixed'] / GB:.2f} GB"),
        ("checkpoint staging", f"{report['staging'] / GB:.2f} GB"),
        ("pools of cached tokens", f"{report['pools'] / GB:.2f} GB"),
        ("full tokens, window sized by tokens", f"{scaled:,}"),
        ("full tokens, window sized by slots", f"{ring:,} ({ring / max(scaled, 1) - 1:+.1%})"),
        *(_hisparse_rows(report) if report["hisparse"] else _cached_rows(report)),
        *(
            (f"host memory: {name}", f"{size / GB:.2f} GB")
            for name, size in report["host_bytes"].items()
        ),
        ("host memory in all", f"{sum(report['host_bytes'].values()) / GB:.2f} GB"),
        (
            f"host memory, the share of one of {ranks} ranks",
            f"{report['machine']['host_bytes'] / GB:.2f} GB",
        ),
        *((f"{talk}: {name}", f"{count:,}") for name, count in report["prompts"].items()),
        ("running requests are limited by", report["limits_running"]),
        ("cached prompts are limited by", report["limits_cached"] or "-"),
    ]


def _cached_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    talk, records = report["conversation"], report["conversation"]["checkpoints"]
    return [
        ("a checkpoint", f"{report['per_checkpoint'] / 1e6:.3f} MB"),
        (f"pages of {talk['name']}", f"{talk['pages']:,}"),
        (
            f"checkpoints of {talk['name']} ({report['policy']})",
            f"{records:,}, {records * report['per_checkpoint'] / 1e6:,.1f} MB",
        ),
    ]


def _hisparse_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    found = report["hisparse"]
    prompt = f"prompts of {report['conversation']['last']:,} tokens"
    return [
        ("HiSparse: host_to_device_ratio", f"{found['ratio']}"),
        ("HiSparse: tables of the request slots", f"{found['tables'] / GB:.2f} GB"),
        ("HiSparse: device C4 rows of a layer", f"{found['rows']:,}"),
        ("HiSparse: a hot buffer", f"{found['hot_buffer_rows']:,} rows"),
        ("HiSparse: longest sequence", f"{found['longest_sequence']:,} tokens"),
        (f"HiSparse: hot buffers, {prompt}", f"{found['hot_buffers']:,}"),
        (f"HiSparse: computed at once, {prompt}", f"{found['prefills']:,}"),
    ]
