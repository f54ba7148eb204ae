"""How much of a model's behaviour a compressed prefix keeps, by method and budget.

Three measures, because they disagree: *continuation* (the text that follows the span, teacher-forced),
*answers* (the full cache answers questions greedily, the compressed one is teacher-forced on these answers)
and *needles* (facts planted at random depth in real text and in filler, asked for after compression).
"""

from __future__ import annotations

import json
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from benchmarks.fidelity.methods import Method, PeerMethod, parse_methods
from benchmarks.fidelity.report import markdown_table, plot, rich_table, summarise
from benchmarks.fidelity.run import Row, as_dict, case_id, from_dict, measure_case
from benchmarks.fidelity.served import ServedHost, measure_case_served, served_host
from benchmarks.peers import export_selections
from grkv_sglang.model import ensure_model

console = Console()


def main(
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of .txt and source files; repeatable. Default: Python's own library: code."
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
    filler: Annotated[int, typer.Option(help="Documents of filler that hold nothing but one fact.")] = 12,
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
    options = Options(
        texts=texts or default_texts(), contexts=[int(length) for length in context.split(",")],
        continuation=continuation, documents=documents, filler=filler, questions=questions,
        answer_tokens=answer_tokens, facts=facts, seed=seed, model=model or ensure_model(), device=device,
        dtype=dtype, out=out, peer_folder=peer_folder, served=served,
    )  # fmt: skip
    shares = [float(budget) for budget in budgets.split(",")]
    runs = [(m, b) for m in parse_methods(methods, options.selections) for b in shares]
    rows = benchmark(options, runs)
    wanted = {(method.name, budget) for method, budget in runs}
    summaries = summarise([row for row in rows if (row.method, row.budget) in wanted])
    title = f"{options.model.name}, context {context}, {documents} documents"
    console.print(rich_table(summaries, title))
    if out is not None:
        out.with_suffix(".md").write_text(markdown_table(summaries), encoding="utf-8")
        plot(summaries, out.with_suffix(".png"), title)


@dataclass(frozen=True)
class Options:
    """What `main` says, checked; the fields are its options."""

    texts: list[Path]
    contexts: list[int]
    continuation: int
    documents: int
    filler: int
    questions: int
    answer_tokens: int
    facts: int
    seed: int
    model: Path
    device: str
    dtype: str
    out: Path | None
    peer_folder: Path | None
    served: bool

    @property
    def selections(self) -> Path:
        """Where kvpress's selections are kept."""
        return self.peer_folder or (self.out.parent if self.out else Path.cwd()) / "kvpress-selections"

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the numbers, besides methods and budgets."""
        names = (
            "continuation", "documents", "filler", "questions", "answer_tokens", "facts", "seed", "dtype",
            "served",
        )  # fmt: skip
        return {
            "model": self.model.name,
            "texts": [folder.name for folder in self.texts],
            **{name: getattr(self, name) for name in names},
        }


def benchmark(
    options: Options,
    runs: Sequence[tuple[Method, float]],
    filler_runs: Sequence[tuple[Method, float]] | None = None,
    first: int | None = None,
) -> list[Row]:
    """Measure every method at its budget on every case; rows that are in the file already stay.

    `filler_runs` replaces `runs` on documents of filler; `first` takes only the first so many cases.
    """
    rows = load_rows(options.out, options.settings)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    cases = [
        case
        for length in options.contexts
        for case in build_cases(
            options.texts, tokenizer, documents=options.documents, filler_documents=options.filler,
            context_tokens=length, continuation_tokens=options.continuation, n_questions=options.questions,
            facts_per_document=options.facts, seed=options.seed,
        )
    ]  # fmt: skip
    cases = cases[:first]
    export_peers([case for case in cases if case.kind != "filler" or filler_runs is None], runs, options)
    done = {(row.case, row.context_tokens, row.method, row.budget) for row in rows}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        host = stack.enter_context(_host(options, cases))
        progress = stack.enter_context(Progress(*columns, console=console))
        bar = progress.add_task("measuring", total=len(cases) * len(runs))
        for case in cases:
            length = len(case.context)
            progress.update(bar, description=f"{case.name} ({length} tokens)")
            wanted = runs if filler_runs is None or case.kind != "filler" else filler_runs
            missing = [(m, b) for m, b in wanted if (case.name, length, m.name, b) not in done]
            progress.advance(bar, len(wanted) - len(missing))
            if not missing:
                continue
            if isinstance(host, ServedHost):
                rows += measure_case_served(
                    host, case, [(m.name, b) for m, b in missing],
                    answer_tokens=options.answer_tokens, on_row=lambda: progress.advance(bar),
                )  # fmt: skip
            else:
                rows += measure_case(
                    host, case, missing,
                    answer_tokens=options.answer_tokens, on_row=lambda: progress.advance(bar),
                )  # fmt: skip
            save(options.out, options.settings, rows)
    return rows


@contextmanager
def _host(options: Options, cases: list[Case]) -> Iterator[Host | ServedHost]:
    if options.served:
        longest = max(len(case.context) for case in cases)
        with served_host(
            options.model, device=options.device, dtype=options.dtype, context_tokens=longest
        ) as host:
            yield host
    else:
        yield Host(options.model, device=options.device, dtype=getattr(torch, options.dtype))


def default_texts() -> list[Path]:
    """The running Python's standard library: code, which is there everywhere. Give `--texts` for prose."""
    return [Path(sysconfig.get_path("stdlib"))]


def export_peers(cases: list[Case], runs: Sequence[tuple[Method, float]], options: Options) -> None:
    """Have kvpress choose its tokens, in an environment of its own."""
    peers = {method.peer: None for method, _ in runs if isinstance(method, PeerMethod)}
    if not peers:
        return
    export_selections(
        {case_id(case): case.context for case in cases},
        model=options.model,
        budgets=sorted({budget for method, budget in runs if isinstance(method, PeerMethod)}),
        methods=list(peers),
        out_dir=options.selections,
        dtype=options.dtype,
        console=console,
    )


def load_rows(path: Path | None, settings: dict[str, Any] | None) -> list[Row]:
    """What an earlier run of the same settings left; None for any settings.

    Raises:
        typer.BadParameter: the file holds another run.
    """
    if path is None or not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if settings is not None and found["settings"] != settings:
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
