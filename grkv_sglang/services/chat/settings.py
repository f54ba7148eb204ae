"""Settings of the chat server: a file, ``GRKVCHAT_<FIELD>`` variables, or flags of ``grkv chat``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from grkv_sglang.services.common.serve import is_loopback

ENV_PREFIX = "GRKVCHAT_"
"""Not ``GRKV_CHAT_``: the plugin refuses variables that begin with its own prefix and are not its own."""


class ChatSettings(BaseModel):
    """Everything that can be set, with the checks that need more than one field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all of the machine's.")
    port: int = Field(8100, ge=1, le=65535, description="Port to listen on.")
    engine_url: str = Field(
        "http://127.0.0.1:30000", pattern=r"^https?://", description="The SGLang server, without /v1."
    )
    engine_api_key: str | None = Field(None, description="SGLang's --api-key.")
    database_url: str | None = Field(
        None,
        description="Where conversations are kept, as SQLAlchemy names it "
        "(postgresql+psycopg://user:password@host/name). Default: an SQLite file in the user's data folder.",
    )
    registration: Literal["open", "closed"] | None = Field(
        None,
        validate_default=True,
        description="Whether visitors may make an account. Default: open where only this machine reaches the "
        "server; must be given elsewhere.",
    )
    session_days: float = Field(30.0, gt=0.0, description="Days that a sign-in lasts.")
    trusted_proxies: str = Field(
        "127.0.0.1", description="Addresses, with commas, of proxies whose X-Forwarded headers are believed."
    )
    system_message: str = Field(
        "You are a helpful assistant. Answer in Markdown.",
        description="First message of new conversations; empty for none.",
    )
    max_tokens: int = Field(512, ge=1, description="Most tokens of one answer.")
    temperature: float = Field(0.7, ge=0.0, le=2.0, description="0 for the likeliest token each time.")
    max_message_characters: int = Field(20_000, ge=1, description="Longest message that is taken.")
    compress_after_tokens: int = Field(
        512,
        ge=1,
        description="The history is compressed whenever so many of its tokens are not in a span yet. Times "
        "the budget it must be well above the 32 slots that every span keeps.",
    )
    budget: float | None = Field(
        None, gt=0.0, le=1.0, description="Share of the history's tokens that is kept. Default: the engine's."
    )
    profile: str | None = Field(None, description="Compression profile. Default: the engine's.")
    silence_s: float = Field(
        300.0, gt=0.0, description="Seconds without a token after which an answer is given up."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged.")

    @field_validator("registration")
    @classmethod
    def _is_decided(cls, value: str | None, info: ValidationInfo) -> str | None:
        host = info.data.get("host")
        if value is None and host is not None and not is_loopback(host):
            raise ValueError(
                f"with host {host} others can reach this server: set registration to open or closed. With "
                "closed, make the accounts before: start it once on 127.0.0.1 with the same database"
            )
        return value

    @property
    def registration_open(self) -> bool:
        return self.registration != "closed"

    @property
    def max_body_bytes(self) -> int:
        """Of a request: a message of the longest kind, in JSON that escapes every character."""
        return 12 * self.max_message_characters + 4096


def default_database_url() -> str:
    """An SQLite file in the user's data folder, which is made if it is not there."""
    import platformdirs

    folder = Path(platformdirs.user_data_dir("grkv_sglang", appauthor=False, ensure_exists=True))
    return f"sqlite:///{folder / 'chat.db'}"
