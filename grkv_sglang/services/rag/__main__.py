"""``python -m grkv_sglang.services.rag``: `grkv rag` without the other commands."""

import typer

from grkv_sglang.commands.options import with_settings
from grkv_sglang.services.rag.command import rag
from grkv_sglang.services.rag.settings import RagSettings

if __name__ == "__main__":
    typer.run(with_settings(rag, RagSettings))
