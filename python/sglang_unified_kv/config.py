"""Settings: one frozen object from the environment, checked as a whole.

The flag ``--hicache-swa-offload-page-stride`` reaches it through the environment too, because
SGLang's own argument record has no room for foreign fields and child processes inherit the
environment (see ``edits/launch/arguments.py``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from .names import (
    BIT_EXACT_HICACHE,
    BIT_EXACT_RADIX,
    CHECKPOINT_HOST_GB,
    CHECKPOINT_POLICY,
    HISPARSE,
    PROVENANCE,
    RING_FIXES,
    STORAGE_PER_RANK,
    unknown_variables,
)
from .names import STRIDE_VARIABLE as OFFLOAD_PAGE_STRIDE

STATE_STAGING_PAGES: Final = "SGLANG_SWA_HICACHE_STATE_STAGING_PAGES"
DBG_CHECKSUM: Final = "SGLANG_SWA_DBG_CHECKSUM"


class ConfigError(ValueError):
    """One or more environment variables hold a value that is not allowed, or do not exist.

    ``reasons`` holds one line per variable: name, value found, what is allowed, remedy.
    """

    def __init__(self, reasons: list[str]):
        super().__init__("\n".join(reasons))
        self.reasons = reasons


def _switch(value: object) -> object:
    """SGLang's spellings of a boolean environment variable, and no others."""
    spelled = {"1": True, "true": True, "yes": True, "y": True}
    spelled |= {"0": False, "false": False, "no": False, "n": False}
    return spelled.get(value.strip().lower(), value) if isinstance(value, str) else value


Switch = Annotated[bool, BeforeValidator(_switch), Field(strict=True)]


class Settings(BaseSettings):
    """What the operator asked for. Whether it takes effect is decided in ``engage.py``."""

    model_config = SettingsConfigDict(frozen=True, populate_by_name=True, extra="forbid")

    bit_exact_hicache: Switch = Field(
        default=False,
        alias=BIT_EXACT_HICACHE,
        description="Bit-exact prefix reuse with the hierarchical cache. Default: off.",
        json_schema_extra={"allowed": "0 or 1"},
    )
    bit_exact_radix: Switch = Field(
        default=False,
        alias=BIT_EXACT_RADIX,
        description="Bit-exact prefix reuse on the device tree alone, with the hierarchical cache "
        "off. Default: off.",
        json_schema_extra={"allowed": "0 or 1"},
    )
    offload_page_stride: int | None = Field(
        default=None,
        ge=1,
        alias=OFFLOAD_PAGE_STRIDE,
        description="Take a checkpoint at every Nth page boundary, as the policy 'grid' does. Unit: pages "
        "of 256 tokens. Default: unset, the placement policy decides.",
        json_schema_extra={"allowed": "an integer >= 1, in pages"},
    )
    checkpoint_policy: Literal["combined", "sparse", "grid", "tails", "branch", "spaced"] | None = (
        Field(
            default=None,
            alias=CHECKPOINT_POLICY,
            description="Where checkpoints are taken: 'grid' (every boundary, or every Nth with a stride), "
            "'tails' (ends of prompt and output), 'branch' (tails, and where requests leave a cached path), "
            "'spaced' (branch, and at growing distances before the prompt's end), 'sparse' (of these what "
            "saves enough) or 'combined' (sparse, and a grid as dense as the host budget affords). Default: "
            "grid if a stride is given, otherwise combined.",
            json_schema_extra={"allowed": "combined, sparse, grid, tails, branch or spaced"},
        )
    )
    checkpoint_host_gb: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        alias=CHECKPOINT_HOST_GB,
        description="Host memory for checkpoints. Unit: GB (1e9 bytes) per rank. Default: unset, "
        "one record for every 16 KV host pages (without HiCache: device pages) and 64 at least, with the "
        "policy 'grid' one for every stride of them; at most a quarter of free memory.",
        json_schema_extra={"allowed": "a number > 0, in GB (1e9 bytes) per rank"},
    )
    state_staging_pages: int | None = Field(
        default=None,
        ge=1,
        alias=STATE_STAGING_PAGES,
        description="Bound on the device staging of checkpoints. Unit: records. "
        "Default: unset, sized for the page boundaries of one prefill chunk.",
        json_schema_extra={"allowed": "an integer >= 1, in records of device staging"},
    )
    provenance: Literal["live", "strict"] = Field(
        default="live",
        alias=PROVENANCE,
        description="When two runs computed the same tokens: attach a missing checkpoint of one "
        "run to the pages of the other ('live', counted) or drop it ('strict'). Default: live.",
        json_schema_extra={"allowed": "live or strict"},
    )
    dbg_checksum: Switch = Field(
        default=False,
        alias=DBG_CHECKSUM,
        description="Read every restore back from the device and compare it with its capture. Waits "
        "for the device: for debugging. Default: off.",
        json_schema_extra={"allowed": "0 or 1"},
    )

    storage_per_rank: Switch = Field(
        default=False,
        alias=STORAGE_PER_RANK,
        description="Every tensor-parallel rank stores pages and checkpoints of its own, instead of "
        "rank 0 for all: for collectives that do not give every rank the same bits. Default: off.",
        json_schema_extra={"allowed": "0 or 1"},
    )
    ring_fixes: Switch = Field(
        default=False,
        alias=RING_FIXES,
        description="Count the per-request sliding-window ring by request slots wherever SGLang "
        "compares it with tokens. Independent of the other switches. Default: off.",
        json_schema_extra={"allowed": "0 or 1"},
    )
    hisparse: Switch = Field(
        default=False,
        alias=HISPARSE,
        description="--enable-hisparse on the unified pool. Counts the ring by request slots as well. "
        "Default: off.",
        json_schema_extra={"allowed": "0 or 1"},
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls, init_settings, env_settings, dotenv_settings, file_secret_settings
    ):
        # Only load_settings reads an environment; an object built by hand holds what it was given.
        return (init_settings,)


class Variable(NamedTuple):
    """An environment variable, for messages and the reference."""

    name: str
    default: object
    allowed: str
    description: str


def variables() -> list[Variable]:
    """Every variable that :func:`load_settings` reads."""
    found = []
    for field in Settings.model_fields.values():
        extra = field.json_schema_extra
        assert field.alias and isinstance(extra, dict)
        found.append(
            Variable(field.alias, field.default, str(extra["allowed"]), field.description or "")
        )
    return found


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from ``environ`` (default: the process environment).

    A variable set to the empty string counts as unset.

    Raises:
        ConfigError: naming every variable whose value is not allowed, and every one that begins like ours
            and is none.
    """
    environ = os.environ if environ is None else environ
    allowed = {variable.name: variable.allowed for variable in variables()}
    found: dict[str, Any] = {name: environ[name] for name in allowed if environ.get(name)}
    reasons, settings = unknown_variables(environ), None
    try:
        settings = Settings(**found)
    except ValidationError as error:
        bad = sorted({str(item["loc"][0]) for item in error.errors()}, key=list(allowed).index)
        reasons += [
            f"{name}={found[name]!r} is not allowed: it must be {allowed[name]}; "
            "correct it or unset it"
            for name in bad
        ]
    if reasons or settings is None:
        raise ConfigError(reasons)
    if settings.offload_page_stride and settings.checkpoint_policy not in (None, "grid"):
        raise ConfigError(
            [
                f"{CHECKPOINT_POLICY}={settings.checkpoint_policy!r} has no stride, and "
                f"{OFFLOAD_PAGE_STRIDE}={settings.offload_page_stride} asks for a grid; unset one of them"
            ]
        )
    return settings
