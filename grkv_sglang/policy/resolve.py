"""Turn a request's raw options into checked ones, in the tokenizer process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from grkv_sglang.config import GrkvConfig, load_config
from grkv_sglang.policy.boundaries import BoundaryError, MessageMarkers, find_prefix_end, learn_markers
from grkv_sglang.policy.options import OptionsError, check_options, parse_options


def resolve_options(custom_params: Any, token_ids: Sequence[int], tokenizer: Any) -> dict[str, Any]:
    """Validated options as flat data, with ``prefix_end`` replaced by ``prefix_end_tokens``.

    Raises OptionsError (a ValueError), which SGLang answers with status 400.
    """
    options = parse_options(custom_params)
    if options.prefix_end is not None:
        try:
            end = find_prefix_end(token_ids, _markers(tokenizer), options.prefix_end)
        except BoundaryError as error:
            raise OptionsError(f"custom_params.grkv: prefix_end={options.prefix_end!r}: {error}") from error
        options = options.model_copy(update={"prefix_end": None, "prefix_end_tokens": end})
    check_options(options, _config(), prompt_tokens=len(token_ids))
    return options.model_dump(exclude_none=True)


@lru_cache(maxsize=1)
def _config() -> GrkvConfig:
    return load_config()


@lru_cache(maxsize=4)
def _markers(tokenizer: Any) -> MessageMarkers:
    if tokenizer is None:
        raise BoundaryError(
            "the server has no tokenizer (--skip-tokenizer-init); give prefix_end_tokens instead"
        )
    return learn_markers(tokenizer)
