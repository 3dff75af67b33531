"""``sglang-unified-kv plan``: what fits on a machine, from SGLang's own sizes, and the launch line for it."""

from __future__ import annotations

import json
import logging
import os
import warnings as python_warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import engage
from ..config import (
    BIT_EXACT_HICACHE,
    BIT_EXACT_RADIX,
    CHECKPOINT_HOST_GB,
    HISPARSE,
    RING_FIXES,
    Settings,
    load_settings,
)
from ..names import requested
from ..plan.capacity import (
    GB,
    Machine,
    Sizes,
    checkpoints,
    device_refusals,
    first_limits,
    host_refusals,
    prompts,
    warnings,
)
from ..plan.choice import Choice, Given, choose
from ..plan.conversation import Conversation
from .plan_line import line_of
from .plan_picture import draw
from .plan_table import show
from .stand_in import write_config as write_stand_in

PRODUCT_SWITCHES = (BIT_EXACT_HICACHE, RING_FIXES, HISPARSE)


def _write_config(folder: Path | None) -> None:
    if folder is None:
        return
    try:
        write_stand_in(folder)
    except OSError as error:
        raise typer.BadParameter(f"{error}; name a folder without a config.json") from error
    typer.echo(f"{folder}/config.json: a stand-in for DeepSeek-V4-Pro's, for plan alone")
    raise typer.Exit


def plan(
    launch_flags: Annotated[
        list[str],
        typer.Argument(
            metavar="-- LAUNCH FLAGS",
            help="As for sglang.launch_server. --hicache-ratio and --max-running-requests are chosen where "
            "they are not given.",
        ),
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
        float,
        typer.Option(
            min=1,
            help="Memory of one whole host that is free when the caches are built, 1e9 bytes. SGLang leaves "
            "10.74 of it alone and gives each rank an equal share of the rest.",
        ),
    ],
    ranks_per_host: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks on one host, each with host pools of its own. Default: tensor x pipeline x data "
            "parallel size over --nnodes, from the launch flags.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(min=257, help="Length of the prompts to be counted.")
    ] = 50_000,
    new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that each of them generates.")
    ] = 1_000,
    turns: Annotated[
        int,
        typer.Option(
            min=1,
            help="Turns of a conversation, each of which sends again all that was said. Counted at its end.",
        ),
    ] = 1,
    turn_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that each later turn adds to what was said.")
    ] = 1_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture of capacity over slots and stride here.")
    ] = None,
    write_config: Annotated[
        Path | None,
        typer.Option(
            callback=_write_config,
            is_eager=True,
            metavar="DIR",
            help="Write a stand-in for DeepSeek-V4-Pro's config.json into this folder and exit.",
        ),
    ] = None,
) -> None:
    """Print what a rank of DeepSeek-V4 on unified KV holds, what runs out first, and the launch line.

    Bytes and capacities come from the functions that size the real pools. Our variables count as the
    environment sets them. If it turns no switch on, those for exact reuse, ring accounting and HiSparse count
    as on, unless it sets them to 0. Needs SGLang and the model's config.json, no GPU.

    Exit code 0: the launch line is printed last. 1: SGLang would refuse what was given, or no such request
    fits; each reason is printed after "no:". 2: it could not be planned.
    """
    from .doctor import UPSTREAM_ERRORS

    environ = dict(os.environ)
    flags = list(launch_flags)
    talk = Conversation(prompt_tokens, new_tokens, turns, turn_tokens)
    try:
        planner, settings, args = _planner(flags)
        fraction = args.mem_fraction_static
        if fraction is None:
            raise typer.BadParameter(
                "--mem-fraction-static is not given, and SGLang derives it from a GPU that is not here: give "
                "it, as the server's log has it or, say, 0.85"
            )
        machine = Machine(hbm_gb, weights_gb, host_gb, ranks_per_host or planner.ranks_per_host)
        available = machine.available(fraction)
        if available <= 0:
            raise typer.BadParameter(
                f"--weights-gb {weights_gb} leaves nothing of {hbm_gb} GB x --mem-fraction-static {fraction}"
            )

        def sizes_of(*, running=None, ratio=None, budget=None) -> Sizes:
            told = settings if budget is None else _with_budget(settings, budget)
            return planner.sizes(available, machine, told, running, args.max_total_tokens, ratio)

        # Not as resolved, where every one of them has a value.
        given = Given(
            hicache=args.enable_hierarchical_cache and not args.enable_hisparse,
            ratio=args.hicache_ratio,
            budget=settings.checkpoint_host_gb,
            running=args.max_running_requests,
        )
        choice = choose(sizes_of, machine, talk, given)
        if plot is not None:
            draw(
                plot,
                lambda n: sizes_of(running=n, ratio=choice.ratio, budget=choice.budget),
                machine,
                choice.sizes.slots - 1,
            )
    except UPSTREAM_ERRORS as error:
        raise typer.BadParameter(f"SGLang rejects this: {error}") from error
    ranks = planner.runner.attn_dp_size
    report = _report(choice, given, machine, available, talk, ranks)
    report["warnings"] += _not_engaged(settings, args, choice.sizes)
    if choice.sizes.staging and args.chunked_prefill_size is None:
        report["warnings"].append(
            "--chunked-prefill-size is not given, and SGLang chooses it by the GPU: give your server's, for "
            "checkpoint staging depends on it"
        )
    report["launch"] = None
    if not report["refusals"]:
        command, env = line_of(
            environ,
            _switches(settings, choice.sizes, given),
            flags,
            _variables(choice),
            _chosen_flags(choice, given, ranks),
        )
        report["launch"] = {"env": env, "command": command}
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show(report)
    raise typer.Exit(1 if report["refusals"] else 0)


def _planner(flags: list[str]):
    """SGLang's sizer for these flags, in the state of a rank on ROCm; with the settings, and the flags."""
    os.environ["SGLANG_UNIFIED_KV_REFERENCE_ENGINE"] = "1"
    for switch in () if requested(os.environ) else PRODUCT_SWITCHES:
        if not os.environ.get(switch):
            os.environ[switch] = "1"
            # Nobody asked for it, so nobody misses it where the flags leave it without effect.
            python_warnings.filterwarnings("ignore", f"{switch}=1 has no effect", RuntimeWarning)
    # SGLang tells its sizes as it goes, and we warn of what the report says.
    logging.disable(logging.WARNING)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.arg_groups.hisparse_hook import validate_hisparse
    from sglang.srt.arg_groups.validation_hook import check_server_args
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import is_gfx95_supported

    from ..edits.launch.arguments import facts_of
    from ..plan.planner import Planner

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
    # It sets flags that others imply.
    check_server_args(args)
    facts = facts_of(args)
    if args.hicache_ratio is None and not args.hicache_size:
        # The plan chooses one.
        facts = replace(facts, hicache_host_memory_fraction=None)
    engage.engage(settings, facts)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    return Planner(args), settings, args


def _with_budget(settings: Settings, budget: float) -> Settings:
    return settings.model_copy(update={"checkpoint_host_gb": budget})


def _report(
    choice: Choice,
    given: Given,
    machine: Machine,
    available: int,
    talk: Conversation,
    ranks: int,
) -> dict[str, Any]:
    sizes = choice.sizes
    held = prompts(sizes, talk)
    running, cached = first_limits(held)
    found = asdict(sizes)
    if sizes.hisparse:
        found["hisparse"] |= sizes.hisparse.figures(talk.last)
    refusals = device_refusals(sizes, talk)
    if choice.without_host(given):
        refusals.append(_no_division(machine, given, sizes, talk))
    else:
        refusals += host_refusals(sizes, machine)
    return found | {
        "machine": asdict(machine) | {"host_bytes": machine.host_bytes},
        "available": available,
        "host_bytes": sizes.host_bytes,
        "prompt_tokens": talk.prompt,
        "new_tokens": talk.new,
        "conversation": asdict(talk)
        | {
            "name": str(talk),
            "last": talk.last,
            "pages": talk.pages(sizes.pairs),
            "checkpoints": checkpoints(sizes, talk),
        },
        "prompts": held,
        "limits_running": running,
        "limits_cached": cached,
        "running": {"rank": choice.fitting, "server": choice.fitting * ranks},
        "best_split": asdict(choice.split) if choice.split else None,
        "notes": _notes(choice, given, machine, talk, ranks),
        "warnings": warnings(sizes, machine, available, talk),
        "refusals": refusals,
    }


def _no_division(machine: Machine, given: Given, sizes: Sizes, talk: Conversation) -> str:
    beside = ""
    if sizes.exact:
        beside = " with its checkpoints"
    if given.budget is not None:
        beside = f" beside {CHECKPOINT_HOST_GB}={given.budget:g}"
    return (
        f"--hicache-ratio is not given, and none holds one conversation of {talk}{beside} in the rank's "
        f"{machine.host_bytes / GB:.1f} GB of host memory; plan for a shorter one or for more --host-gb"
    )


def _notes(
    choice: Choice, given: Given, machine: Machine, talk: Conversation, ranks: int
) -> list[str]:
    """What was chosen, and what would be better than what was given."""
    rank, server = choice.fitting, choice.fitting * ranks
    fit = f"--max-running-requests: {rank:,} of {talk} fit on a rank at once, {server:,} on the server"
    if given.running is None:
        found = [f"{fit}; chosen, because none is given"]
    else:
        found = [f"{fit}; given is {given.running:,}"]
    if split := choice.split:
        records = split.checkpoint_host_gb
        beside = f", {CHECKPOINT_HOST_GB}={records:g}" if records else ""
        best = (
            f"--hicache-ratio {split.hicache_ratio:g}{beside}: the division of the rank's "
            f"{machine.host_bytes / GB:.1f} GB that holds the most, {split.prompts:,} of {talk}"
        )
        found.append(best + ("; chosen, because none is given" if given.ratio is None else ""))
    return found


def _not_engaged(settings: Settings, args, sizes: Sizes) -> list[str]:
    """Exact reuse is on, could do something, and does not."""
    if sizes.exact or not (settings.bit_exact_hicache and args.enable_hierarchical_cache):
        return []
    from ..edits.launch.arguments import facts_of

    missing = engage.missing_conditions(settings, facts_of(args))
    return [f"{BIT_EXACT_HICACHE}=1 would have no effect. Missing: {'; '.join(missing)}"]


def _switches(settings: Settings, sizes: Sizes, given: Given) -> list[str]:
    """Ours that take effect."""
    if sizes.hisparse:
        return [HISPARSE]
    exact = [BIT_EXACT_HICACHE if given.hicache else BIT_EXACT_RADIX] if sizes.exact else []
    return exact + ([RING_FIXES] if settings.ring_fixes else [])


def _variables(choice: Choice) -> dict[str, str]:
    return {} if choice.budget is None else {CHECKPOINT_HOST_GB: f"{choice.budget:g}"}


def _chosen_flags(choice: Choice, given: Given, ranks: int) -> list[str]:
    found = []
    if choice.ratio is not None and given.ratio is None:
        found += ["--hicache-ratio", f"{choice.ratio:g}"]
    if choice.running is not None:
        found += ["--max-running-requests", str(choice.running * ranks)]
    return found
