"""``python -m grkv_sglang.services.chat``: `grkv chat` without the other commands."""

import typer

from grkv_sglang.commands.options import with_settings
from grkv_sglang.services.chat.command import chat
from grkv_sglang.services.chat.settings import ChatSettings

if __name__ == "__main__":
    typer.run(with_settings(chat, ChatSettings))
