"""Ask questions about one long document: the first request has it compressed, the others are served from it.

Start a server, then run this:

    grkv serve --budget 0.1 -- --model-path "$(grkv model --path)" --port 30000
    python examples/ask_document.py --url http://127.0.0.1:30000 --file book.txt "Who is she?" "Where is it?"
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import httpx


def ask(client: httpx.Client, document: str, question: str) -> tuple[str, dict[str, Any], float]:
    """Answer, what the prompt was served from, and seconds."""
    started = time.perf_counter()
    response = client.post(
        "/v1/chat/completions",
        json={
            "model": "default",
            "messages": [
                {"role": "system", "content": "Answer the question from the document, in one sentence."},
                # A message of its own, so that every question has the same prefix.
                {"role": "user", "content": document},
                {"role": "user", "content": question},
            ],
            "temperature": 0,
            "max_tokens": 48,
            "return_meta_info": True,
            "custom_params": {"grkv": {"prefix_end": "document"}},
        },
    )
    if response.status_code != 200:
        raise SystemExit(f"the server answered {response.status_code}: {response.text}")
    choice = response.json()["choices"][0]
    return choice["message"]["content"], choice["meta_info"]["grkv"][0], time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--file", type=Path, required=True, help="a text that fits the model's context")
    parser.add_argument("questions", nargs="+")
    arguments = parser.parse_args()
    document = arguments.file.read_text(encoding="utf-8")
    with httpx.Client(base_url=arguments.url, timeout=600) as client:
        for question in arguments.questions:
            answer, served, seconds = ask(client, document, question)
            print(f"\n{question}\n{answer.strip()}")
            print(
                f"  {seconds:.1f} s; {served['span_tokens']} tokens from {served['span_slots']} slots, "
                f"{served['exact_tokens']} exact"
            )


if __name__ == "__main__":
    main()
