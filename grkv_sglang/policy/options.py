"""What one request may ask for: ``sampling_params.custom_params["grkv"]``, flat and typed.

Flat because SGLang 0.5.23's IPC carries custom parameters as scalars one level deep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from grkv_sglang.config import GrkvConfig, MatchMode
from grkv_sglang.policy.ranges import parse_ranges
from grkv_sglang.settings import describe_errors

OPTIONS_KEY = "grkv"


class OptionsError(ValueError):
    """A request's options are wrong; SGLang answers with status 400 and this message."""


class RequestOptions(BaseModel):
    """Options of one request.

    Where the reusable prefix ends (`prefix_end_tokens` or `prefix_end`) makes the request explicit:
    that prefix is compressed when the request is done, unless a good enough span exists.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    mode: MatchMode | None = Field(None, description="What this request may be served from.")
    prefix_end_tokens: int | None = Field(
        None, ge=1, description="The reusable prefix is this many tokens of the prompt."
    )
    prefix_end: Literal["system", "document"] | None = Field(
        None, description="The reusable prefix ends with the system message, or with the first user message."
    )
    budget: float | None = Field(None, gt=0.0, le=1.0, description="Least share of tokens kept in a span.")
    budget_tokens: int | None = Field(None, ge=1, description="Least number of tokens kept in a span.")
    min_quality: float | None = Field(None, ge=0.0, le=1.0, description="Least quality of a span.")
    profile: str | None = Field(None, description="Profile to compress this prefix with.")
    protected: str | None = Field(
        None,
        description='Positions of the prompt whose tokens are kept as they are: "0-120,800-830", ends '
        "exclusive. They come on top of the budget.",
    )
    pin: bool | None = Field(
        None, description="Evict the span of this prefix last, within the server's limit for pinned spans."
    )
    ttl_s: float | None = Field(
        None, gt=0.0, description="Drop the span of this prefix once it was unused for so many seconds."
    )
    forced: Literal["all", "none", "packed"] | None = Field(
        None,
        description="Test only: a span that keeps every token, or none; `packed` keeps every token, stored "
        "as with budgets per head.",
    )

    @field_validator("protected")
    @classmethod
    def _ranges(cls, value: str | None) -> str | None:
        if value is not None:
            parse_ranges(value)
        return value

    @model_validator(mode="after")
    def _exclusive(self) -> RequestOptions:
        if self.prefix_end is not None and self.prefix_end_tokens is not None:
            raise ValueError("give prefix_end or prefix_end_tokens, not both")
        if self.budget is not None and self.budget_tokens is not None:
            raise ValueError("give budget or budget_tokens, not both")
        if self.prefix_end is None and self.prefix_end_tokens is None:
            for name in ("forced", "pin", "protected", "ttl_s"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs prefix_end_tokens or prefix_end")
        return self


NO_OPTIONS = RequestOptions()


def parse_options(custom_params: Any) -> RequestOptions:
    """Options out of a request's ``custom_params``; defaults when there are none.

    Raises OptionsError naming the wrong field and the valid ones.
    """
    if not isinstance(custom_params, dict) or OPTIONS_KEY not in custom_params:
        return NO_OPTIONS
    raw = custom_params[OPTIONS_KEY]
    if not isinstance(raw, dict):
        raise OptionsError(
            f"custom_params.grkv must be an object with the fields {', '.join(RequestOptions.model_fields)}; "
            f"got {type(raw).__name__}"
        )
    try:
        return RequestOptions.model_validate(raw)
    except ValidationError as error:
        raise OptionsError(f"custom_params.grkv: {describe_errors(error, RequestOptions)}") from error


def check_options(options: RequestOptions, config: GrkvConfig, *, prompt_tokens: int) -> None:
    """Reject what parses but cannot be served. Raises OptionsError."""
    from grkv_sglang.core import get_profile

    if options.forced is not None and not config.allow_forced:
        raise OptionsError(
            "custom_params.grkv: forced is a test option; start the server with GRKV_ALLOW_FORCED=true"
        )
    end = options.prefix_end_tokens
    share = options.budget
    if options.budget_tokens is not None:
        share = min(1.0, options.budget_tokens / (end or prompt_tokens))
    if share is not None and not config.budget_min <= share <= config.budget_max:
        raise OptionsError(
            f"custom_params.grkv: this server allows budgets between {config.budget_min:g} and "
            f"{config.budget_max:g} of a prefix's tokens, got {share:g}"
        )
    if options.protected is not None and end is not None:
        last = parse_ranges(options.protected)[-1][1]
        if last > end:
            raise OptionsError(
                f"custom_params.grkv: protected must lie in the prefix of {end} tokens, got an end of {last}"
            )
    if end is not None and end >= prompt_tokens:
        raise OptionsError(
            f"custom_params.grkv: prefix_end_tokens must leave at least one token of the prompt behind it, "
            f"got {end} of {prompt_tokens}"
        )
    if options.profile is not None:
        try:
            get_profile(options.profile)
        except ValueError as error:
            raise OptionsError(f"custom_params.grkv: profile: {error}") from error


def asks_per_head(options: Mapping[str, Any]) -> str | None:
    """What of checked options makes a span whose KV heads keep different numbers of tokens; None: nothing."""
    from grkv_sglang.core import get_profile

    if options.get("forced") == "packed":
        return "forced='packed'"
    name = options.get("profile")
    return f"profile {name!r}" if name is not None and get_profile(name).storage == "per_head" else None
