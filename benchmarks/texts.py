"""Text that the benchmarks send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grkv_sglang.demo.documents import load_documents


def shipped_tokens(tokenizer: Any) -> list[int]:
    """Token ids of the demo's documents, one behind the other."""
    return [t for d in load_documents() for t in tokenizer(d.text, add_special_tokens=False)["input_ids"]]


def text_tokens(tokenizer: Any, folder: Path | None) -> list[int]:
    """Token ids of a folder's .txt files in order of their names, or of the demo's documents without one.

    Raises:
        ValueError: the folder has no .txt file.
    """
    if folder is None:
        return shipped_tokens(tokenizer)
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise ValueError(f"{folder}: expected at least one .txt file, found none")
    texts = (path.read_text(encoding="utf-8") for path in paths)
    return [t for text in texts for t in tokenizer(text, add_special_tokens=False)["input_ids"]]
