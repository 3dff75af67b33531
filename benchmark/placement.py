"""Placement policies on traces: hits, captures, and what a placement that knew the future could do.

    python benchmark/placement.py --trace conversation_trace.jsonl --made-up --plot docs/placement.png

Without ``--trace`` the traces are made up alone. Budgets are parts of the records that a checkpoint at every
boundary would need for all pages of the trace; with ``--page-part`` the cache of pages is limited as well.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from sglang_unified_kv.checkpoint.policy import POLICIES, policy_of
from sglang_unified_kv.placement.bound import (
    fewest_captures,
    hits_by_captures,
    most_hits,
)
from sglang_unified_kv.placement.replay import Replay, Tally
from sglang_unified_kv.placement.trace import (
    MADE_UP,
    PAGE,
    Request,
    distinct_pages,
    made_up,
    mooncake,
)

STRIDES = (1, 2, 4, 8, 16, 32, 64)
PARTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
RECORD_MB, PAGE_MB = 9.224, 2.3
"""Of DeepSeek-V4-Pro."""
SHOWN = [name for name in POLICIES if name != "grid"]
_requests: dict[str, list[Request]] = {}


def main(
    trace: Annotated[
        Path | None, typer.Option(help="Mooncake trace, one JSON object a line.")
    ] = None,
    made: Annotated[
        bool, typer.Option("--made-up", help="The traces that are made up, beside the trace given.")
    ] = False,
    outputs: Annotated[
        bool, typer.Option(help="Later turns hold the outputs of earlier ones.")
    ] = True,
    count: Annotated[
        int, typer.Option(min=1, help="Requests of each trace that is made up.")
    ] = 3000,
    page_part: Annotated[
        int, typer.Option(min=1, help="The cache holds this part of the trace's pages.")
    ] = 1,
    processes: Annotated[int, typer.Option(min=1)] = 2,
    plot: Annotated[Path | None, typer.Option(help="Write curves here.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """Replay and print."""
    if trace is not None:
        _requests[trace.stem] = mooncake(trace, outputs=outputs)
    if made or trace is None:
        _requests.update({name: made_up(name, count) for name in MADE_UP})
    found = {}
    # Forked: the workers have the requests.
    with ProcessPoolExecutor(processes) as pool:
        for name in _requests:
            found[name] = measure(pool, name, page_part)
            show(name, found[name])
    if plot is not None:
        draw(plot, found)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2))


def measure(pool: ProcessPoolExecutor, name: str, page_part: int) -> dict:
    """All figures of one trace."""
    requests = _requests[name]
    pages = distinct_pages(requests)
    limit = max(pages // page_part, 1) if page_part > 1 else None
    records = [max((limit or pages) // part, 1) for part in PARTS]
    unlimited = len(requests) + 2 * pages
    jobs = {
        (policy, stride, size): pool.submit(replay, name, policy, stride, size, limit)
        for size in [unlimited, *records]
        for policy, stride in [*((p, 1) for p in SHOWN), *(("grid", s) for s in STRIDES)]
    }
    done = {job: future.result() for job, future in jobs.items()}
    limits = done["grid", 1, unlimited][2]
    ideal = sum(limits)
    corners = hits_by_captures(requests) if limit is None else None
    return {
        "requests": len(requests),
        "pages": pages,
        "page_limit": limit,
        "seconds": {policy: done[policy, 1, unlimited][1] for policy in [*SHOWN, "grid"]},
        "unlimited": {policy: asdict(done[policy, 1, unlimited][0]) for policy in [*SHOWN, "grid"]},
        "fewest_captures": corners
        and {share: fewest_captures(corners, share * ideal) for share in (0.9, 0.95, 0.98, 1.0)},
        "ideal_pages": ideal,
        "records": records,
        "bound": [hits * PAGE for hits in most_hits(requests, records, limits)],
        "by_budget": {
            f"{policy} {stride}" if policy == "grid" else policy: [
                asdict(done[policy, stride, size][0]) for size in records
            ]
            for policy, stride in [*((p, 1) for p in SHOWN), *(("grid", s) for s in STRIDES)]
        },
    }


def replay(
    name: str, policy: str, stride: int, records: int, pages: int | None
) -> tuple[Tally, float, list[int]]:
    """One policy at one budget: sums, seconds, and pages that each prompt matched."""
    chosen = policy_of(policy, page_size=PAGE, stride=stride)
    start = time.perf_counter()
    run = Replay(chosen, records=records, pages=pages)
    limits = [run.serve(request).matched // PAGE for request in _requests[name]]
    return run.tally, time.perf_counter() - start, limits


def best_grid(found: dict, budget: int) -> tuple[int, int]:
    """Most hit tokens of any stride at a budget, and the stride."""
    return max((found["by_budget"][f"grid {s}"][budget]["hit"], s) for s in STRIDES)


def show(name: str, found: dict) -> None:
    console = Console(width=140)
    grid = found["unlimited"]["grid"]
    console.print(
        f"[bold]{name}[/bold]: {found['requests']:,} requests, {found['pages']:,} pages, "
        f"{grid['matched'] / max(grid['prompt'], 1):.1%} of prompt tokens in the tree"
    )
    table = Table(title="Unlimited budget")
    for column in (
        "policy",
        "hit, % of tree",
        "recomputed, Mtokens",
        "captured, % of grid",
        "captured, GB",
        "resident, GB",
        "never used",
        "replay, s",
    ):
        table.add_column(column, justify="right" if column != "policy" else "left")
    for policy, tally in found["unlimited"].items():
        table.add_row(
            policy,
            f"{tally['hit'] / max(tally['matched'], 1):.2%}",
            f"{(tally['matched'] - tally['hit']) / 1e6:.2f}",
            f"{tally['captured'] / grid['captured']:.2%}",
            f"{tally['captured'] * RECORD_MB / 1e3:.1f}",
            f"{tally['most'] * RECORD_MB / 1e3:.1f}",
            f"{1 - tally['used'] / max(tally['captured'], 1):.0%}",
            f"{found['seconds'][policy]:.1f}",
        )
    console.print(table)
    if found["fewest_captures"]:
        bounds = ", ".join(
            f"{float(share):.0%} of hits: {captures / grid['captured']:.2%}"
            for share, captures in found["fewest_captures"].items()
        )
        console.print(f"Who knows the future must capture at least, for {bounds} of grid 1's.")
    table = Table(
        title="Hits, % of what the tree holds, by budget (captured, % of grid 1; evictions)"
    )
    for column in ("records", "GB", "bound", "best grid", *SHOWN):
        table.add_column(column, justify="right")
    ideal = found["ideal_pages"] * PAGE or 1
    for i, records in enumerate(found["records"]):
        hits, stride = best_grid(found, i)
        cells = []
        for policy in SHOWN:
            tally = found["by_budget"][policy][i]
            mark = "" if tally["hit"] >= hits else " <"
            cells.append(
                f"{tally['hit'] / ideal:.2%}{mark} "
                f"({tally['captured'] / grid['captured']:.0%}; {tally['evictions']:,})"
            )
        table.add_row(
            f"{records:,}",
            f"{records * RECORD_MB / 1e3:.1f}",
            f"{found['bound'][i] / ideal:.2%}",
            f"{hits / ideal:.2%} ({stride})",
            *cells,
        )
    console.print(table)


def draw(path: Path, found: dict) -> None:
    """Hit share over budget, one panel per trace."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(len(found), 2)
    rows = -(-len(found) // columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(8 * columns, 5 * rows), layout="constrained", squeeze=False
    )
    for axes, (name, one) in zip(panels.flat, found.items(), strict=False):
        budgets = [records * RECORD_MB / 1e3 for records in one["records"]]
        prompt = one["unlimited"]["grid"]["prompt"]
        axes.axhline(
            100 * one["ideal_pages"] * PAGE / prompt,
            color="black",
            lw=0.8,
            label="what the tree holds",
        )
        axes.plot(
            budgets,
            [100 * h / prompt for h in one["bound"]],
            "k:",
            label="bound, knowing the future",
        )
        best = [100 * best_grid(one, i)[0] / prompt for i in range(len(budgets))]
        axes.plot(budgets, best, color="grey", lw=3, alpha=0.6, label="best stride of the grid")
        for label, tallies in one["by_budget"].items():
            shares = [100 * t["hit"] / prompt for t in tallies]
            if label.startswith("grid"):
                axes.plot(budgets, shares, color="grey", lw=0.7, ls="--")
                axes.annotate(label, (budgets[0], shares[0]), fontsize=6, color="grey")
            else:
                axes.plot(
                    budgets, shares, marker=".", lw=2 if label == "combined" else 1, label=label
                )
        axes.set(
            title=name,
            xscale="log",
            ylim=(0, None),
            xlabel="host memory for checkpoints, GB",
            ylabel="hit tokens, % of prompt tokens",
        )
        axes.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)
