"""Shape of the demo's result: what ``--json`` writes. Times in seconds, sizes in tokens or KV slots."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from grkv_sglang.serving import Engine

ENGINES: tuple[Engine, ...] = ("stock", "off", "grkv")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RequestRecord(_Record):
    """One question to one server."""

    question: str
    answer: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float
    total_s: float
    document_slots: int  # KV slots that this request's document prefix stands for
    span_tokens: int = 0  # of the prefix, those that came out of spans
    span_slots: int = 0


class EngineRun(_Record):
    """A document's questions on one server: the first is cold, the others find the document cached."""

    cold_ttft_s: float
    warm_ttft_s: list[float]
    answers: list[str]
    reprefilled_document_tokens_warm: int  # document tokens that warm requests computed again
    requests: list[RequestRecord]


class SpanRecord(_Record):
    """How a document was compressed, from the server's own state."""

    compressions: int
    compressed_slots: int  # slots of the whole document prefix: exact part plus spans
    twin_freed: bool
    budget: float
    profile: str
    quality: float | None
    error_before: float | None
    error_after: float | None
    compress_s: float
    probe_s: float
    pass_s: float
    select_s: float
    regress_s: float
    copy_s: float
    span_hits: int
    free_slots_before: int  # of SGLang's pool: before the first question,
    free_slots_after_compression: int  # when it was answered and its full-size KV freed,
    free_slots_after: int  # and after the last answer, which stays cached too


class DocumentResult(SpanRecord):
    """One document on all servers, and how the plugin compressed it."""

    name: str
    tokens: int
    full_slots: int
    reprefilled_document_tokens_warm: int  # on the plugin's server
    stock: EngineRun
    off: EngineRun
    grkv: EngineRun


class Summary(_Record):
    """The figures that a reader looks for first."""

    warm_ttft_ratio_grkv_off: float  # median over the warm requests, question by question
    compress_s: float  # median over the documents
    compress_share_of_grkv_cold_ttft: float
    compress_share_of_off_cold_ttft: float
    compressed_share: float  # slots of all compressed documents by their tokens
    reprefilled_document_tokens_warm: int


class Agreement(_Record):
    """Greedy outputs of one run beside those of another, prompt by prompt."""

    prompts: int
    equal: int
    differing_prompts: list[int]
    first_difference_at: list[int]  # output position, per differing prompt


class SentinelResult(_Record):
    """The same prompts behind dummy tokens that a span of zero slots removes from attention."""

    dummy_tokens: int
    versus_off: Agreement
    served_from_span: int  # requests of which more than the dummies came out of spans
    sentinel_rows: int  # requests whose row begins with at least the dummies' sentinels


class IdentityResult(_Record):
    """Spans that keep every token must not change an output."""

    prompts: int
    prefixes: int
    new_tokens: int
    versus_off: Agreement
    served_from_span: int
    versus_stock: Agreement
    off_versus_stock: Agreement
    stock_batched_versus_sequential: Agreement  # what batching alone changes
    sentinels: SentinelResult


class NoLongPrefixResult(_Record):
    """What the plugin costs where nothing is long: relative extra time of a burst of short prompts."""

    pairs: int
    prompts_per_burst: int
    prompt_tokens: int
    new_tokens: int
    mean_cost: float
    median_cost: float
    upper_95: float  # one-sided, of the mean
    off_s: list[float]
    grkv_s: list[float]


class MemoryChecks(_Record):
    """Which checks watched the run; a failed SGLang check ends the server and so the demo."""

    switches: dict[str, str]
    census_ok: bool
    census_checks: int
    census_last_error: str | None


class Versions(_Record):
    """What the figures were measured with."""

    grkv_sglang: str
    sglang: str
    torch: str
    transformers: str
    python: str
    platform: str
    device: str
    cpu_count: int


class DemoResult(_Record):
    """Everything that one run of the demo measured."""

    model: str
    seed: int
    quick: bool
    budget: float
    profile: str
    pool_tokens: int
    new_tokens: int
    server_start_s: dict[str, float]
    versions: Versions
    summary: Summary
    documents: list[DocumentResult]
    identity: IdentityResult
    no_long_prefix: NoLongPrefixResult
    memory_checks: MemoryChecks


def write_json(result: DemoResult, path: Path) -> None:
    """Write the result.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> DemoResult:
    """Read what `write_json` wrote.

    Raises:
        OSError: the file cannot be read.
        pydantic.ValidationError: it is not such a result.
    """
    return DemoResult.model_validate_json(path.read_text(encoding="utf-8"))
