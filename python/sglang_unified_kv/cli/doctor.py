"""``sglang-unified-kv doctor``: would exact reuse or HiSparse engage here, and if not, why."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from .. import engage, names, plugin
from ..config import BIT_EXACT_HICACHE, ConfigError, load_settings
from ..hooking.series import preflight

# How SGLang turns down arguments while it resolves and validates them.
UPSTREAM_ERRORS = (
    AssertionError,
    ImportError,
    NotImplementedError,
    OSError,
    RuntimeError,
    ValueError,
)


@dataclass
class Report:
    """What was checked and found.

    Attributes:
        checks: reasons by check; none means passed.
        notes: what holds, but not as the flags say.
        platform_checked: False with ``--device cpu``, where the flags alone are.
    """

    checked: str
    sglang: str | None = None
    settings: dict[str, Any] | None = None
    facts: dict[str, Any] | None = None
    decision: str | None = None
    feature: str = "Exact reuse"
    checks: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    platform_checked: bool = True

    @property
    def engages(self) -> bool:
        return not any(self.checks.values())


def doctor(
    launch_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- LAUNCH FLAGS]", help="Flags as for sglang.launch_server."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell whether exact reuse (with --enable-hisparse: HiSparse) would engage here, and why not.

    Exit code 0 only if it would. Without launch flags only the environment half is checked, and with
    --device cpu the flags alone: whether they would do on ROCm.
    """
    report = examine(list(launch_flags or []))
    if as_json:
        typer.echo(json.dumps({"engages": report.engages} | asdict(report), indent=2))
    else:
        _print(report)
    raise typer.Exit(0 if report.engages else 1)


def examine(launch_flags: list[str]) -> Report:
    """Run every check that the ones before it leave possible. Loads the plugins in this process."""
    report = Report("environment and launch flags" if launch_flags else "environment only")
    try:
        report.sglang = version("sglang")
    except PackageNotFoundError:
        pass
    report.checks["requested"] = _requested()
    if report.checks["requested"]:
        # Go on as if it were, so that everything else that is missing shows at once.
        os.environ[BIT_EXACT_HICACHE] = "1"
    report.checks["settings"] = _settings(report)
    report.checks["plugin entry"] = _entry()
    report.checks["edits"] = _edits()
    if any(report.checks[name] for name in ("settings", "plugin entry", "edits")):
        return report
    report.checks["plugins load"] = _load_plugins()
    if report.checks["plugins load"]:
        return report
    if launch_flags:
        _launch_half(report, launch_flags)
    else:
        _environment_half(report)
    return report


def _requested() -> list[str]:
    features = (*names.FEATURES, names.HISPARSE)
    if names.requested(os.environ, features):
        return []
    return [f"none of {', '.join(features)} is set; set one of them to 1"]


def _settings(report: Report) -> list[str]:
    try:
        report.settings = load_settings().model_dump()
    except ConfigError as error:
        return error.reasons
    return []


def _entry() -> list[str]:
    reasons = plugin.duplicate_entries()
    own = entry_points(group=plugin.GROUP, name=plugin.NAME)
    if not any(e.value == "sglang_unified_kv.plugin:register" for e in own):
        reasons.append(
            f"the entry point {plugin.NAME!r} is not installed; install the package with pip"
        )
    only = os.environ.get("SGLANG_PLUGINS", "")
    if only and plugin.NAME not in [name.strip() for name in only.split(",")]:
        reasons.append(f"SGLANG_PLUGINS={only} leaves out {plugin.NAME}; add it or unset it")
    return reasons


def _edits() -> list[str]:
    return preflight(plugin.requested_series(os.environ))


def _load_plugins() -> list[str]:
    from sglang.srt.plugins import load_plugins

    try:
        load_plugins()
    except SystemExit:
        return ["a plugin refused to load, its reasons are on stderr"]
    return [reason for s in plugin.requested_series(os.environ) for reason in s.audit()]


def _environment_half(report: Report) -> None:
    from ..edits.launch.arguments import environment_facts

    facts = environment_facts()
    missing = engage.violations(engage.ENVIRONMENT_CONDITIONS, facts)
    _judge(report, missing, engage.ENVIRONMENT_OBSTACLES, facts)


def _judge(
    report: Report,
    missing: tuple[str, ...],
    obstacles: tuple[engage.Rule, ...],
    facts: engage.EnvironmentFacts,
) -> None:
    report.facts = asdict(facts)
    report.checks["conditions"] = list(missing)
    report.checks["obstacles"] = list(engage.violations(obstacles, facts))


def _launch_half(report: Report, launch_flags: list[str]) -> None:
    from sglang.srt.arg_groups.validation_hook import check_server_args
    from sglang.srt.server_args import prepare_server_args

    from ..edits.launch.arguments import facts_of, replaced_flags
    from ..hisparse import support

    report.checks["launch flags"] = []
    server_args: Any = None
    try:
        parsed = prepare_server_args(launch_flags)
        parsed.resolve_once()
        server_args = parsed
        check_server_args(server_args)
    except SystemExit:
        report.checks["launch flags"] = ["SGLang's parser rejects them, see stderr"]
        return
    except UPSTREAM_ERRORS as error:
        report.checks["launch flags"] = [
            f"SGLang rejects them: {error}{_hint(error, launch_flags)}",
            "SGLang stops at the first that it rejects: ask again when that is corrected",
        ]
        if server_args is None:
            return
    report.notes = replaced_flags(server_args, launch_flags)
    facts = facts_of(server_args)
    if server_args.device == "cpu" and not (facts.is_hip or facts.reference_engine):
        report.platform_checked = False
        facts = replace(facts, is_hip=True, unified_kv_gate=True)
    # The flags may carry a setting, so it is read again.
    settings = load_settings()
    report.settings = settings.model_dump()
    if settings.hisparse and (facts.enable_hisparse or not engage.on(settings)):
        state = support.decide(settings, facts).state
        report.feature, report.decision = "HiSparse", state.value
        missing = engage.violations(support.CONDITIONS, facts)
        _judge(report, missing, support.OBSTACLES, facts)
        return
    report.decision = engage.decide(settings, facts).state.value
    _judge(
        report,
        engage.missing_conditions(settings, facts),
        engage.ENVIRONMENT_OBSTACLES + engage.LAUNCH_OBSTACLES,
        facts,
    )


def _hint(error: Exception, launch_flags: Sequence[str] = ()) -> str:
    """What to do about a complaint that is not of the flags, or of one that was not given."""
    decode = re.search(r"--disaggregation-mode[ =]decode", " ".join(launch_flags))
    if "disable-radix-cache" in str(error) and decode:
        return " (--disaggregation-mode decode turns the radix cache off.)"
    if "topk" in str(error):
        return " (The flag is --speculative-eagle-topk.)"
    if "No accelerator" in str(error):
        return " Run this on the GPU machine, or add --device cpu to check the flags alone."
    if isinstance(error, OSError):
        return " --model-path may be a folder with the model's config.json, with --skip-tokenizer-init."
    return ""


def _print(report: Report) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"checked: {report.checked} (sglang {report.sglang or 'not installed'})")
    for name, reasons in report.checks.items():
        console.print(f"{'[red]no[/red] ' if reasons else '[green]ok[/green] '} {name}")
        for reason in reasons:
            console.print(f"     - {escape(reason)}")
    for note in report.notes:
        console.print(f"[yellow]note[/yellow] {escape(note)}")
    if report.engages and report.facts is not None and report.decision is None:
        console.print(
            "The environment is fit for exact reuse. Add `-- LAUNCH FLAGS` to check those."
        )
    else:
        verdict = "would engage" if report.engages else "would not engage"
        where = "here" if report.platform_checked else "on ROCm; the machine was not checked"
        console.print(f"{report.feature} {verdict} {where}.")
