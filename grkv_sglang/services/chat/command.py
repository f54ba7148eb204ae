"""`grkv chat`: the chat server."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grkv_sglang.services.chat.settings import ENV_PREFIX, ChatSettings
from grkv_sglang.settings import ConfigError, load_settings


def chat(config: Path | None = None, **settings: Any) -> None:
    """Serve a chat page on an SGLang server; conversations are kept, their histories compressed as they grow.

    Example: grkv chat --engine-url http://127.0.0.1:30000
    """
    try:
        loaded = load_chat_settings(config, settings)
        # Imported here: `grkv --help` must not wait for a web framework.
        from grkv_sglang.services.chat.app import create_app
        from grkv_sglang.services.common.serve import run

        app = create_app(loaded)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except ModuleNotFoundError as error:
        print(f"error: {error}: pip install 'grkv-sglang[chat]'", file=sys.stderr)
        raise SystemExit(1) from None
    run(
        app,
        host=loaded.host,
        port=loaded.port,
        trusted_proxies=loaded.trusted_proxies,
        log_level=loaded.log_level,
    )


def load_chat_settings(
    config: Path | None, settings: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> ChatSettings:
    """Settings of the command line, the environment and a file. Raises ConfigError."""
    return load_settings(
        ChatSettings,
        ENV_PREFIX,
        environ=environ,
        config_file=config,
        overrides=settings,
        label="chat settings",
    )
