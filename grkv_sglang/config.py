"""The one configuration of the plugin: a validated model, read once per process.

Sources, later ones win: defaults, a file (``GRKV_CONFIG_FILE``: .toml, .json, .yaml), environment
variables ``GRKV_<FIELD>``. Command-line flags of ``grkv serve`` become such variables, because SGLang
starts its workers as subprocesses and the environment is what reaches all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from grkv_sglang.settings import CONFIG_FILE, ConfigError, as_text, load_settings

RADIX_BACKEND = "grkv"
"""The name under which SGLang knows the radix cache."""

TORCH_ATTENTION = "grkv_torch"
TRITON_ATTENTION = "grkv_triton"
FLASHINFER_ATTENTION = "grkv_flashinfer"
ATTENTION_BACKENDS = {
    "torch_native": TORCH_ATTENTION,
    "triton": TRITON_ATTENTION,
    "flashinfer": FLASHINFER_ATTENTION,
}
"""SGLang's attention backends that have a subclass here, and the name under which SGLang knows it."""

ENV_PREFIX = "GRKV_"
CONFIG_FILE_ENV = ENV_PREFIX + CONFIG_FILE

MatchMode = Literal["exact", "prefer_exact", "prefer_compressed"]
Trigger = Literal["explicit", "insert", "reuse", "pressure"]


class GrkvConfig(BaseModel):
    """Settings of the server. Every request may override mode, budget and min_quality for itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compression: bool = Field(True, description="Create spans at all. Off: an exact radix cache.")
    mode: MatchMode = Field(
        "prefer_compressed",
        description="What a request without options may be served from: only exact KV, the longest match "
        "preferring exact KV at equal length, or the longest match preferring a span at equal length.",
    )
    budget: float = Field(0.1, gt=0.0, le=1.0, description="Share of a span's tokens that is kept.")
    budget_tokens: int | None = Field(
        None, ge=1, description="Kept tokens of a span as an absolute number; replaces `budget` when set."
    )
    budget_min: float = Field(
        0.01, gt=0.0, le=1.0, description="Least share of a prefix's tokens that a request may ask to keep."
    )
    budget_max: float = Field(
        1.0, gt=0.0, le=1.0, description="Largest share of a prefix's tokens that a request may ask to keep."
    )
    profile: str = Field("default", description="Selection and regression settings, by name.")
    min_quality: float = Field(
        0.0, ge=0.0, le=1.0, description="Requests are not served from spans of a lower measured quality."
    )
    quality_floor: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="A span of a lower measured quality is not stored; its prefix stays exact.",
    )
    protect_system: bool = Field(
        False,
        description="Never compress the system message, with the tool definitions that chat templates put "
        "there.",
    )
    triggers: tuple[Trigger, ...] = Field(
        ("explicit", "reuse", "pressure"),
        description="When a prefix is compressed: when a request marks it, when a finished request leaves a "
        "long enough stretch (insert), when a second request reuses it, when free slots run low (pressure). "
        "As text: names separated by commas.",
    )
    min_span_tokens: int = Field(
        512, ge=2, description="Shorter stretches are compressed only where a request marks them."
    )
    reuse_min_hits: int = Field(
        1, ge=1, description="Requests that must have reused a stretch before `reuse` compresses it."
    )
    cooldown_requests: int = Field(
        32,
        ge=1,
        description="After a failed compression the same prefix is tried again once so many requests came.",
    )
    step_tokens: int = Field(
        1024,
        ge=1,
        description="Bound on the compression work of one scheduler step: tokens of the span, times the "
        "share of the model's layers done in the step. (One probe pass of about 64 tokens is a step too.)",
    )
    pressure_watermark: float = Field(
        0.15,
        ge=0.0,
        lt=1.0,
        description="With a smaller share of the pool's slots free, twins are freed and cold stretches are "
        "compressed.",
    )
    pressure_reserve: float = Field(
        0.02,
        ge=0.0,
        lt=1.0,
        description="Share of the pool that eviction leaves free where it can, for compression's own slots.",
    )
    merge_after_spans: int = Field(
        4, ge=2, description="A path with so many private spans in a row has them merged into the next one."
    )
    max_generations: int = Field(
        2, ge=0, description="How often compressed KV may be compressed again in a merge; 0: never."
    )
    pin_share: float = Field(
        0.5, ge=0.0, le=1.0, description="Most slots that pinned spans may hold, as a share of the pool."
    )
    ttl_s: float | None = Field(
        None, gt=0.0, description="Spans unused for so many seconds are dropped; unset: only under pressure."
    )
    free_exact_twin: Literal["at_once", "under_pressure"] = Field(
        "at_once",
        description="When the full-size KV of a compressed span is given back: as soon as nobody uses it, "
        "or when the pool runs out.",
    )
    allow_forced: bool = Field(
        False, description="Accept the request option `forced` (spans that keep all or no tokens), for tests."
    )
    census: bool = Field(
        False, description="At every idle moment check that each KV slot has exactly one owner."
    )

    @field_validator("triggers", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value

    @model_validator(mode="after")
    def _budgets_in_order(self) -> GrkvConfig:
        if self.budget_min > self.budget_max:
            raise ValueError("budget_min must not exceed budget_max")
        return self

    @model_validator(mode="after")
    def _reserve_below_watermark(self) -> GrkvConfig:
        if self.pressure_reserve > self.pressure_watermark and "pressure" in self.triggers:
            raise ValueError("pressure_reserve must not exceed pressure_watermark")
        return self


def load_config(environ: Mapping[str, str] | None = None) -> GrkvConfig:
    """Read file and environment; raises ConfigError as `load_settings` does."""
    return load_settings(GrkvConfig, ENV_PREFIX, environ=environ, label="grkv configuration")


def to_environment(values: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that carry `values` (field name -> value) to SGLang's processes."""
    unknown = sorted(set(values) - set(GrkvConfig.model_fields))
    if unknown:
        raise ConfigError(f"grkv configuration: unknown {unknown}; valid are {list(GrkvConfig.model_fields)}")
    return {ENV_PREFIX + name.upper(): as_text(value) for name, value in values.items() if value is not None}
