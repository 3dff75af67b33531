"""The demo's picture: |dlogprob| over the output, per hit kind and prompt, stock against exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from .demo_verdict import CACHED_TOKENS, HITS, Case

_STYLE = {
    "stock": {"color": "#d95f02", "marker": "o", "note": 0.55},
    "exact": {"color": "#1b7ab8", "marker": "s", "note": 0.4},
}


def draw(cases: Sequence[Case], sglang: str, path: Path) -> None:
    """Write a PNG to ``path``.

    The axis is logarithmic down to the smallest difference and has a place for 0 below it, so that
    equal positions are drawn where they are and not left out.

    Raises:
        OSError: ``path`` cannot be written.
    """
    # The figure's own canvas: no global state, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    positions = max(len(case.comparison.dlogprobs) for case in cases)
    differences = [d for case in cases for d in case.comparison.dlogprobs if d > 0]
    low = math.floor(math.log10(min(differences, default=1e-7)))
    high = math.ceil(math.log10(max(differences, default=1.0)))
    figure = Figure(figsize=(12, 10.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(HITS), len(CACHED_TOKENS), sharex=True, sharey=True)
    for row, hit in zip(panels, HITS, strict=True):
        for panel, length in zip(row, CACHED_TOKENS, strict=True):
            shown = [case for case in cases if (case.hit, case.prompt) == (hit, length)]
            _panel(panel, f"{hit} hit, prompt of {length} tokens", shown, positions)
    scale = panels[0][0]
    scale.set_yscale("symlog", linthresh=10.0**low, linscale=0.6)
    decades = range(low, high + 1, max(1, (high - low) // 6))
    scale.set_yticks(
        [0.0, *(10.0**d for d in decades)],
        ["0 (same bits)", *(f"$10^{{{d}}}$" for d in decades)],
    )
    scale.set_ylim(-(10.0**low) / 2, 10.0**high * 2)
    scale.set_xlim(-2, positions)
    for panel in panels[-1]:
        panel.set_xlabel("output position")
    for row in panels:
        row[0].set_ylabel("|logprob after the hit - cold|")
    figure.suptitle(
        f"A prefix hit against the cold run of the same prompt (sglang {sglang}, reference engine)"
    )
    figure.savefig(path, format="png", dpi=130)


def _panel(panel, title: str, cases: Sequence[Case], positions: int) -> None:
    panel.grid(True, which="major", alpha=0.25)
    for case in cases:
        style = _STYLE[case.server]
        values = case.comparison.dlogprobs
        end = "tokens equal"
        if not case.comparison.tokens_equal:
            last = len(values) - 1
            end = f"other token at {last}"
            panel.plot(last, values[-1], "x", color=style["color"], ms=11, mew=2)
            panel.axvspan(last + 0.5, positions, color=style["color"], alpha=0.08, lw=0)
            panel.text(
                (last + 0.5 + positions) / 2,
                style["note"],
                f"{case.server}: another text from here on,\nnothing to compare",
                transform=panel.get_xaxis_transform(),
                color=style["color"],
                ha="center",
                va="center",
                fontsize=9,
            )
        panel.plot(
            range(len(values)),
            values,
            color=style["color"],
            marker=style["marker"],
            ms=3.5,
            lw=0.8,
            label=f"{case.server}: max {case.comparison.max_abs_dlogprob:.2g}, {end}",
        )
    # Above the panel: inside, any place may hold data.
    panel.legend(
        title=title,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        columnspacing=1.2,
        handlelength=1.5,
        frameon=False,
        fontsize=8,
        alignment="left",
    )
