"""Placement policies on traces: hits, captures, and what a placement that knew the future could do.

    python benchmark/placement.py --trace conversation_trace.jsonl --made-up --plot docs/placement.png

Without ``--trace`` the traces are made up alone. Budgets are parts of the records that a checkpoint at every
boundary would need for all pages of the trace; with ``--page-part`` the cache of pages is limited as well.
``--fixed-sum GB`` divides a fixed sum of memory between pages and records instead.
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
from sglang_unified_kv.checkpoint.policy import PAGES_PER_RECORD, POLICIES, policy_of
from sglang_unified_kv.placement.bound import (
    fewest_captures,
    hits_by_captures,
    matches,
    most_hits,
)
from sglang_unified_kv.placement.observed import OBSERVATIONS, most_hits_by_class
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
SEEN_AT = 0.05
"""Captures, in parts of grid 1's, of the bound for policies that go by what they see."""
RECORD_MB, PAGE_MB = 9.224, 2.3
"""Of DeepSeek-V4-Pro."""
SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
"""Parts of a fixed sum of memory that are tried for records."""
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
    fixed_sum: Annotated[
        list[float] | None,
        typer.Option(help="GB that pages and records share; may be given more than once."),
    ] = None,
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
        if fixed_sum:
            show_parts(pool, fixed_sum)
            return
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
    seen = {o: pool.submit(bound_by, name, o, SEEN_AT * pages) for o in OBSERVATIONS if not limit}
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
        "seen": {observed: future.result() for observed, future in seen.items()},
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


def bound_by(name: str, observed: str, captures: float) -> tuple[int, float]:
    """Classes, and pages that no policy hits more than that goes by these."""
    requests, observe = _requests[name], OBSERVATIONS[observed]
    found = zip(requests, matches(requests), strict=True)
    classes = {observe(r, m, n) for r, m in found for n in range(m + 1, len(r.pages) + 1)}
    return len(classes), most_hits_by_class(requests, [captures], observe)[0]


def show_parts(pool: ProcessPoolExecutor, sums: list[float]) -> None:
    """Hits of the default policy by how a fixed sum of memory is divided."""
    default = RECORD_MB / (RECORD_MB + PAGES_PER_RECORD * PAGE_MB)
    for name, requests in _requests.items():
        prompt = sum(r.prompt for r in requests)
        table = Table(
            title=f"{name}: hit tokens, % of prompts', by the records' part of the memory"
        )
        for column in ("GB", f"default, {default:.0%}", *(f"{s:.0%}" for s in SHARES)):
            table.add_column(column, justify="right")
        jobs = {
            size: [
                pool.submit(
                    replay,
                    name,
                    "combined",
                    1,
                    max(int(size * 1e3 * share / RECORD_MB), 1),
                    int(size * 1e3 * (1 - share) / PAGE_MB),
                )
                for share in (default, *SHARES)
            ]
            for size in sums
        }
        for size, futures in jobs.items():
            hits = [future.result()[0].hit / prompt for future in futures]
            table.add_row(f"{size:g}", *(f"{h:.2%}" for h in hits))
        Console(width=140).print(table)


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
    for observed, (classes, pages) in found["seen"].items():
        console.print(
            f"Policies that go by {classes:,} classes of boundaries ({observed}): at most "
            f"{pages / max(found['ideal_pages'], 1):.2%} of hits at {SEEN_AT:.0%} of captures."
        )
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
    for axes in panels.flat[len(found) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)
