"""Fills the generated sections of the pages from the code they speak of.

``python docs/generate.py`` rewrites them; with ``--check`` it only says which pages are not up to date. A
section stands between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from in_tree_parts import PARTS, part_of
from sglang_unified_kv import engage
from sglang_unified_kv.cli import app
from sglang_unified_kv.config import HISPARSE, variables
from sglang_unified_kv.edits.launch.arguments import add_stride_flag
from sglang_unified_kv.edits.series import ALL
from sglang_unified_kv.hisparse import support
from sglang_unified_kv.hooking.series import Edit, Kind
from sglang_unified_kv.launches import LINES, block
from sglang_unified_kv.metrics import ANY, EXACT, METRICS, Metric
from sglang_unified_kv.metrics import HISPARSE as HISPARSE_METRICS
from sglang_unified_kv.reference import plugin as reference

HERE = Path(__file__).parent


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
    )


def prose(text: str, indent: str = "") -> str:
    """A paragraph in lines of 120 columns."""
    text = " ".join(text.split())
    return textwrap.fill(
        text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def variables_table() -> str:
    def default(value: object) -> str:
        return "unset" if value is None else str(int(value) if isinstance(value, bool) else value)

    rows = [(f"`{v.name}`", default(v.default), v.allowed, v.description) for v in variables()]
    return table(("variable", "default", "allowed", "meaning"), rows)


def reference_engine_table() -> str:
    rows = [
        (
            f"`{reference.ENV}`",
            "0",
            "0 or 1",
            "SGLang on the reference engine, for tests and demos.",
        ),
        (
            f"`{reference.CHUNK_INVARIANT_ENV}`",
            "1",
            "0 or 1",
            "A token's bits do not depend on how a prompt was cut into chunks. 0 is faster.",
        ),
    ]
    return table(("variable", "default", "allowed", "meaning"), rows)


def launch_flags() -> str:
    parser = argparse.ArgumentParser(add_help=False)
    add_stride_flag(lambda *_: None, parser, object)
    rows = [
        (f"`{action.option_strings[0]} {action.metavar}`", action.help or "")
        for action in parser._actions
    ]
    return table(("launch flag", "meaning"), rows)


def commands() -> str:
    root = typer.main.get_command(app)
    return "\n\n".join(_command(name, command) for name, command in root.commands.items())


def _command(name: str, command: Any) -> str:
    rows, types = [], get_type_hints(command.callback)
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            shown = parameter.metavar
        elif parameter.is_flag:
            shown = "`, `".join((*parameter.opts, *parameter.secondary_opts))
        else:
            shown = f"{parameter.opts[-1]} {parameter.metavar or _kind(types[parameter.name])}"
        told = "" if parameter.default in (None, False) else f" Default: {parameter.default}."
        rows.append((f"`{shown}`", f"{parameter.help}{told}"))
    text = "\n\n".join(prose(part) for part in command.help.split("\n\n"))
    return f"### `sglang-unified-kv {name}`\n\n{text}\n\n{table(('argument', 'meaning'), rows)}"


def _kind(annotation: Any) -> str:
    """What a value of an option is; of ``int | None`` it is an INT."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    return kinds[0].__name__.upper()


class _Found:
    """Facts that are unknown: every value is shown as a placeholder."""

    def __getattr__(self, name: str) -> str:
        return "..."


def _line(rule: engage.Rule) -> str:
    if callable(rule.otherwise):
        return rule.otherwise(_Found())
    return re.sub(r"\{\w+(!r)?\}", "...", rule.otherwise)


def conditions() -> str:
    lines = [_line(r) for r in engage.ENVIRONMENT_CONDITIONS + engage.LAUNCH_CONDITIONS]
    tiers = [f"with `{name}`: {_line(rule)}" for name, rule in engage.TIER_CONDITIONS.items()]
    hisparse = [f"with `{HISPARSE}`: --enable-hisparse"]
    return "\n".join(prose(f"- {line}", "  ") for line in (*lines, *tiers, *hisparse))


def refusals() -> str:
    exact = engage.ENVIRONMENT_OBSTACLES + engage.LAUNCH_OBSTACLES
    rules = dict.fromkeys((*exact, *support.OBSTACLES))
    rows = [
        (_line(rule), "x" if rule in exact else "", "x" if rule in support.OBSTACLES else "")
        for rule in rules
    ]
    rows.append((engage.STRICT_PROVENANCE_WITH_STORAGE, "x", ""))
    return table(("message (`...`: the value found)", "exact reuse", "HiSparse"), rows)


KINDS = {
    Kind.WRAP: "wrap",
    Kind.REPLACE: "replace",
    Kind.OVERRIDE: "override",
    Kind.MEMBER: "new",
    Kind.REGISTRY: "new entry",
    Kind.RELIES_ON: "relied on",
}
"""As explained above the map."""
COLUMNS = ("file and function", "kind", "ours", "why there")


def in_tree() -> str:
    found: dict[str, list[Edit]] = {part: [] for part in PARTS}
    for series in ALL:
        for edit in series:
            found.setdefault(part_of(series, edit), []).append(edit)
    return "\n\n".join(_part(part, edits) for part, edits in found.items())


def _part(part: str, edits: list[Edit]) -> str:
    rows = []
    for edit in edits:
        module, _, name = edit.target.partition(":")
        ours = ""
        if edit.kind is not Kind.RELIES_ON:
            ours = f"`{edit.ours_name.removeprefix('sglang_unified_kv.edits.')}`"
        file = f"`{module.removeprefix('sglang.').replace('.', '/')}.py`"
        rows.append((f"{file} `{name}`", KINDS[edit.kind], ours, edit.why))
    heading = "HiSparse" if part == "hisparse" else part[:1].upper() + part[1:]
    text = f"{prose(PARTS[part])}\n\n" if part in PARTS else ""
    return f"## {heading}\n\n{text}{table(COLUMNS, rows)}"


def metrics() -> str:
    parts = []
    for feature in dict.fromkeys(metric.feature for metric in METRICS):
        rows = [_metric(metric) for metric in METRICS if metric.feature == feature]
        heading = HEADINGS[feature]
        parts.append(f"### {heading}\n\n{table(('metric', 'type', 'meaning'), rows)}")
    return "\n\n".join(parts)


HEADINGS = {ANY: "Any feature", EXACT: "Exact reuse", HISPARSE_METRICS: "HiSparse"}


def _metric(metric: Metric) -> tuple[str, str, str]:
    told = []
    for label, values in metric.labels.items():
        told.append(f"`{label}`" + (f" ({', '.join(values)})" if values else ""))
    labels = f" Labels: {'; '.join(told)}." if told else ""
    ranks = " Every rank." if metric.every_rank else ""
    return f"`{metric.name}`", metric.kind, f"{metric.help}{labels}{ranks}"


def fenced(command: Sequence[str], env: Mapping[str, str]) -> str:
    return f"```bash\n{block(command, env)}\n```"


SECTIONS: dict[str, Callable[[], str]] = {
    "environment variables": variables_table,
    "reference engine": reference_engine_table,
    "launch flags": launch_flags,
    "commands": commands,
    "metrics": metrics,
    "conditions": conditions,
    "refusals": refusals,
    "in-tree map": in_tree,
    **{f"launch {name}": partial(fenced, line.command, line.env) for name, line in LINES.items()},
    **{f"doctor {name}": partial(fenced, line.doctor, line.env) for name, line in LINES.items()},
    **{
        f"plan {n}": partial(fenced, line.plan, line.plan_env)
        for n, line in LINES.items()
        if line.host_gb
    },
    # Where the page has told the environment before.
    **{f"command {name}": partial(fenced, line.command, {}) for name, line in LINES.items()},
}


def filled(text: str) -> str:
    """``text`` with every generated section made anew, as deep in the page as its marks are.

    Raises:
        KeyError: a section that nobody generates.
    """

    def fill(found: re.Match[str]) -> str:
        section = f"{found[2]}\n\n{SECTIONS[found[3]]()}\n\n{found[4]}"
        return textwrap.indent(section, found[1])

    marks = r"^( *)(<!-- generated: (.+?) -->)\n.*?^ *(<!-- end of \3 -->)"
    return re.sub(marks, fill, text, flags=re.S | re.M)


def main(argv: list[str]) -> int:
    stale = []
    for page in sorted([*HERE.glob("*.md"), HERE.parent / "README.md"]):
        text = page.read_text()
        fresh = filled(text)
        if fresh != text:
            stale.append(page.name)
            if "--check" not in argv:
                page.write_text(fresh)
    if stale:
        print("not up to date:" if "--check" in argv else "rewritten:", ", ".join(stale))
    return int(bool(stale) and "--check" in argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
