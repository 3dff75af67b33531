"""Draws ``prefix_hits.svg``: what a hit at a page boundary finds, as released and with the plugin.

``python docs/prefix_hits_picture.py``
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams.update({"svg.hashsalt": "prefix_hits", "svg.fonttype": "none", "font.size": 9})
from matplotlib import pyplot  # noqa: E402

PAGE, BOUNDARY, PROMPT, WINDOW = 256, 512, 700, 128
KEPT, STALE, RESTORED, COMPUTED = "#4c78a8", "#e45756", "#54a24b", "#d9d9d9"
LANES = {"pages": 3, "window": 2, "states": 1, "compute": 0}
NAMES = [
    "tokens to compute",
    "C4 overlap states\nof the request's slot",
    "sliding-window ring\nof the request's slot",
    "compressed pages\nin the radix tree",
]


def bar(axes, lane, start, end, color, text="", dark=True):
    axes.barh(LANES[lane], end - start, left=start, height=0.55, color=color, edgecolor="white")
    if text:
        ink = "white" if dark else "black"
        axes.text((start + end) / 2, LANES[lane], text, ha="center", va="center", color=ink, size=8)


def frame(axes, title):
    axes.set_title(title, loc="left", size=10, weight="bold")
    axes.set(xlim=(0, 740), ylim=(-0.5, 3.6), xticks=[0, 256, 384, 512, 700], yticks=range(4))
    axes.set_yticklabels(NAMES)
    axes.set_xticklabels(["0", "256", "384", "512 = P", "700"])
    axes.axvline(BOUNDARY, color="black", linewidth=1, linestyle="--")
    axes.axvline(PAGE, color="grey", linewidth=0.6, linestyle=":")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)


def stock(axes):
    frame(axes, "SGLang 0.5.23: prompt of 700 tokens, 512 of them cached")
    bar(axes, "pages", 0, PAGE, KEPT, "page 1")
    bar(axes, "pages", PAGE, BOUNDARY, KEPT, "page 2")
    bar(axes, "window", BOUNDARY - WINDOW, BOUNDARY, STALE, "another request's")
    bar(axes, "states", BOUNDARY - 40, BOUNDARY, STALE)
    axes.text(BOUNDARY - 48, LANES["states"], "another request's", ha="right", va="center", size=8)
    bar(axes, "compute", BOUNDARY, PROMPT, COMPUTED, "computed, against\nstale rows", dark=False)


def exact(axes):
    frame(axes, "With this plugin: the checkpoint at P is put back first")
    bar(axes, "pages", 0, PAGE, KEPT, "page 1")
    bar(axes, "pages", PAGE, BOUNDARY, KEPT, "page 2")
    bar(axes, "window", BOUNDARY - WINDOW, BOUNDARY, RESTORED, "restored: P-128 to P")
    bar(axes, "states", BOUNDARY - 40, BOUNDARY, RESTORED)
    axes.text(BOUNDARY - 48, LANES["states"], "restored: P-4 to P", ha="right", va="center", size=8)
    bar(axes, "compute", BOUNDARY, PROMPT, COMPUTED, "computed, as in\na cold run", dark=False)


def main() -> None:
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(8.6, 5.4), layout="constrained")
    stock(upper)
    exact(lower)
    lower.set_xlabel("position of the prompt, tokens (the states are 4 tokens wide, drawn wider)")
    here = Path(__file__).parent
    figure.savefig(here / "prefix_hits.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
