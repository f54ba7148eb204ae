"""How much of a model's behaviour a compressed prefix keeps, by method and budget.

Three measures, because they disagree: *continuation* (the text that follows the span, teacher-forced),
*answers* (the full cache answers questions greedily, the compressed one is teacher-forced on these answers)
and *needles* (facts planted at random depth in real text and in filler, asked for after compression).
"""

from __future__ import annotations

import json
import platform
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoTokenizer

from benchmarks.fidelity.cases import Case, build_cases
from benchmarks.fidelity.host import Host
from benchmarks.fidelity.methods import PeerMethod, parse_methods
from benchmarks.fidelity.report import markdown_table, plot, rich_table, summarise
from benchmarks.fidelity.run import Row, as_dict, case_id, from_dict, measure_case
from benchmarks.fidelity.served import ServedHost, measure_case_served, served_host
from grkv_sglang.model import ensure_model

console = Console()


def main(
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of .txt and source files; repeatable. Default: the shipped books and Python's "
            "standard library."
        ),
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens of the span; several separated by commas.")] = "2048",
    continuation: Annotated[int, typer.Option(help="Tokens of text behind it.")] = 128,
    budgets: Annotated[str, typer.Option(help="Shares of the tokens kept.")] = "0.1,0.2,0.3,0.5",
    methods: Annotated[
        str,
        typer.Option(
            help="Profiles, selection methods ('snapkv', 'snapkv/grkv', 'kvzip+snapkv'), "
            "'merge:cam', 'peer:snapkv'; settings in brackets: 'default[cap_k=none;steps=2]'."
        ),
    ] = "default,copy,best,paper,release",
    documents: Annotated[int, typer.Option(help="Excerpts: two of prose, one of code, and so on.")] = 12,
    filler: Annotated[int, typer.Option(help="Documents of filler that hold nothing but four facts.")] = 6,
    questions: Annotated[int, typer.Option(help="Per excerpt, at most 6.")] = 6,
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 40,
    facts: Annotated[int, typer.Option(help="Planted per excerpt.")] = 2,
    seed: Annotated[int, typer.Option(help="Of excerpts, questions and facts.")] = 0,
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder; default SmolLM2-135M.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    out: Annotated[
        Path | None, typer.Option("--json", help="Write rows here; a file that is there is gone on with.")
    ] = None,
    peer_folder: Annotated[Path | None, typer.Option(help="Where kvpress's selections are kept.")] = None,
    served: Annotated[
        bool, typer.Option("--served", help="Through a running engine instead (top-1 and NLL only).")
    ] = False,
) -> None:
    """Measure methods on excerpts of real text and code, against the full cache."""
    shares = [float(budget) for budget in budgets.split(",")]
    folders = texts or default_texts()
    model_dir = model or ensure_model()
    if peer_folder is None:
        peer_folder = (out.parent if out else Path.cwd()) / "kvpress-selections"
    chosen = parse_methods(methods, peer_folder)
    settings: dict[str, Any] = {
        "model": model_dir.name, "texts": [folder.name for folder in folders], "continuation": continuation,
        "documents": documents, "filler": filler, "questions": questions, "answer_tokens": answer_tokens,
        "facts": facts, "seed": seed, "dtype": dtype, "served": served,
    }  # fmt: skip
    rows = load_rows(out, settings)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    cases = [
        case
        for length in context.split(",")
        for case in build_cases(
            folders, tokenizer, documents=documents, filler_documents=filler,
            context_tokens=int(length), continuation_tokens=continuation, n_questions=questions,
            facts_per_document=facts, seed=seed,
        )
    ]  # fmt: skip
    export_peers(
        cases, [m for m in chosen if isinstance(m, PeerMethod)], model_dir, shares, peer_folder, dtype
    )
    done = {(row.case, row.context_tokens, row.method, row.budget) for row in rows}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        host = stack.enter_context(_host(model_dir, served, device, dtype, cases))
        progress = stack.enter_context(Progress(*columns, console=console))
        bar = progress.add_task("measuring", total=len(cases) * len(chosen) * len(shares))
        for case in cases:
            progress.update(bar, description=f"{case.name} ({len(case.context)} tokens)")
            missing = [
                method
                for method in chosen
                if any((case.name, len(case.context), method.name, b) not in done for b in shares)
            ]
            progress.advance(bar, (len(chosen) - len(missing)) * len(shares))
            if not missing:
                continue
            if isinstance(host, ServedHost):
                rows += measure_case_served(
                    host, case, [method.name for method in missing], shares,
                    answer_tokens=answer_tokens, on_row=lambda: progress.advance(bar),
                )  # fmt: skip
            else:
                rows += measure_case(
                    host, case, missing, shares, answer_tokens=answer_tokens,
                    on_row=lambda: progress.advance(bar),
                )  # fmt: skip
            save(out, settings, rows)
    wanted = {(method.name, budget) for method in chosen for budget in shares}
    summaries = summarise([row for row in rows if (row.method, row.budget) in wanted])
    console.print(rich_table(summaries, f"{model_dir.name}, context {context}, {documents} documents"))
    if out is not None:
        out.with_suffix(".md").write_text(markdown_table(summaries), encoding="utf-8")
        plot(
            summaries, out.with_suffix(".png"), f"{model_dir.name}, context {context}, {documents} documents"
        )


@contextmanager
def _host(
    model_dir: Path, served: bool, device: str, dtype: str, cases: list[Case]
) -> Iterator[Host | ServedHost]:
    if served:
        longest = max(len(case.context) for case in cases)
        with served_host(model_dir, device=device, dtype=dtype, context_tokens=longest) as host:
            yield host
    else:
        yield Host(model_dir, device=device, dtype=getattr(torch, dtype))


def default_texts() -> list[Path]:
    """The books that ship with the demo, and the running Python's standard library."""
    import grkv_sglang.demo

    return [Path(grkv_sglang.demo.__file__).parent / "texts", Path(sysconfig.get_path("stdlib"))]


def export_peers(
    cases: list[Case],
    peers: list[PeerMethod],
    model_dir: Path,
    budgets: list[float],
    folder: Path,
    dtype: str,
) -> None:
    """Have kvpress choose its tokens, in an environment of its own."""
    if not peers:
        return
    from benchmarks.peers import export_selections

    export_selections(
        {case_id(case): case.context for case in cases},
        model=model_dir,
        budgets=budgets,
        methods=[peer.peer for peer in peers],
        out_dir=folder,
        dtype=dtype,
        console=console,
    )


def load_rows(path: Path | None, settings: dict[str, Any]) -> list[Row]:
    """What an earlier run of the same settings left.

    Raises:
        typer.BadParameter: the file holds another run.
    """
    if path is None or not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["settings"] != settings:
        raise typer.BadParameter(f"{path} holds a run of other settings: {found['settings']}")
    return [from_dict(row) for row in found["rows"]]


def save(path: Path | None, settings: dict[str, Any], rows: list[Row]) -> None:
    """Write everything so far, in one move."""
    if path is None:
        return
    figures = {
        "settings": settings,
        "machine": {
            "platform": platform.platform(), "python": platform.python_version(),
            "torch": torch.__version__, "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
        },
        "rows": [as_dict(row) for row in rows],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(figures, indent=0) + "\n", encoding="utf-8")
    scratch.replace(path)


if __name__ == "__main__":
    typer.run(main)
