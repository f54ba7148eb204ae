"""GRKV on plain tensors: selection, regression, guard. Nothing in here knows about an engine."""

from grkv_sglang.core.attention import Attention, Partial, attend, group_rows, join
from grkv_sglang.core.budget import slots_for_budget
from grkv_sglang.core.compress import (
    LayerInputs,
    LayerResult,
    SpanQuality,
    WindowAttention,
    attend_probe,
    compress_layer,
    quality,
    relative_error,
)
from grkv_sglang.core.passes import (
    CUE_TOKENS,
    PassChunk,
    PassResults,
    fitted_queries,
    question_chunks,
    repetition_chunks,
    span_chunks,
)
from grkv_sglang.core.profiles import Profile, get_profile, profile_names
from grkv_sglang.core.queries import QueryPlan, plan_queries, queries_needed
from grkv_sglang.core.regression import KEY_AND_VALUE, UNCHANGED, VALUE_ONLY, Problem, regress
from grkv_sglang.core.rope import RotaryTable, rotate_forward
from grkv_sglang.core.selection import (
    PassKind,
    PassStatistics,
    Scorer,
    ScoringContext,
    get_scorer,
    scorer_names,
)
from grkv_sglang.core.selection.base import always_kept_tokens
from grkv_sglang.core.storage import STORAGE_DTYPES, Storage

__all__ = [
    "CUE_TOKENS",
    "KEY_AND_VALUE",
    "STORAGE_DTYPES",
    "UNCHANGED",
    "VALUE_ONLY",
    "Attention",
    "LayerInputs",
    "LayerResult",
    "Partial",
    "PassChunk",
    "PassKind",
    "PassResults",
    "PassStatistics",
    "Problem",
    "Profile",
    "QueryPlan",
    "RotaryTable",
    "Scorer",
    "ScoringContext",
    "SpanQuality",
    "Storage",
    "WindowAttention",
    "always_kept_tokens",
    "attend",
    "attend_probe",
    "compress_layer",
    "fitted_queries",
    "get_profile",
    "get_scorer",
    "group_rows",
    "join",
    "plan_queries",
    "profile_names",
    "quality",
    "queries_needed",
    "question_chunks",
    "regress",
    "relative_error",
    "repetition_chunks",
    "rotate_forward",
    "scorer_names",
    "slots_for_budget",
    "span_chunks",
]
