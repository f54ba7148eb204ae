"""Text that the benchmarks send."""

from __future__ import annotations

from typing import Any

from grkv_sglang.demo.documents import load_documents


def shipped_tokens(tokenizer: Any) -> list[int]:
    """Token ids of the demo's documents, one behind the other."""
    return [t for d in load_documents() for t in tokenizer(d.text, add_special_tokens=False)["input_ids"]]
