"""`grkv rag`, and the management of tenants and keys."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from grkv_sglang.services.rag.settings import load
from grkv_sglang.settings import ConfigError

if TYPE_CHECKING:
    from grkv_sglang.services.rag.store import Store

FIRST_TENANT = "default"


def rag(config: Path | None = None, **settings: Any) -> None:
    """Answer questions about uploaded documents, from compressed prefixes that all users of a tenant share.

    Needs a server with the plugin (grkv serve). The first start prints a link with a key.

    Example: grkv rag --engine-url http://127.0.0.1:30000
    """
    try:
        loaded = load(config, settings)
        # Imported here: `grkv --help` must not wait for torch and a web framework.
        from grkv_sglang.services.common.serve import run
        from grkv_sglang.services.rag.app import create_app
        from grkv_sglang.services.rag.service import open_parts

        logging.basicConfig(level=loaded.log_level.upper(), format="%(levelname)s: %(name)s: %(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every request
        parts = open_parts(loaded)
        key = first_key(parts.store)
    except ConfigError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        _fail(f"{error}: pip install 'grkv-sglang[rag]'")
    if key is not None:
        host = "127.0.0.1" if loaded.host in ("0.0.0.0", "::") else loaded.host
        host = f"[{host}]" if ":" in host else host
        print(
            f"\n  The first tenant, {FIRST_TENANT!r}, was made. This link opens the page with its key; "
            f"the key is not shown again:\n\n      http://{host}:{loaded.port}/#key={key}\n",
            flush=True,
        )
    run(
        create_app(loaded, parts),
        host=loaded.host,
        port=loaded.port,
        trusted_proxies=loaded.trusted_proxies,
        log_level=loaded.log_level,
    )


def first_key(store: Store) -> str | None:
    """The key of a first tenant, made where there is none; None where there are tenants."""
    return None if store.list_tenants() else store.add_tenant(FIRST_TENANT)


admin_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Tenants and keys of grkv rag. Settings come from GRKVRAG_... and --config, as for grkv rag.",
)
_tenant_app = typer.Typer(no_args_is_help=True, help="Groups of users that share documents.")
_key_app = typer.Typer(no_args_is_help=True, help="What users sign in with.")
admin_app.add_typer(_tenant_app, name="tenant")
admin_app.add_typer(_key_app, name="key")

Config = Annotated[
    Path | None,
    typer.Option("--config", help="Settings from a .toml, .yaml or .json file.", exists=True, dir_okay=False),
]


@_tenant_app.command("add")
def add_tenant(name: Annotated[str, typer.Argument(help="Its name.")], config: Config = None) -> None:
    """Make a tenant and print its first key, which is not shown again."""
    with _store(config) as store:
        print(store.add_tenant(name))


@_tenant_app.command("list")
def list_tenants(config: Config = None) -> None:
    """Show tenants, their documents and keys."""
    with _store(config) as store:
        for tenant, num_documents, keys in store.list_tenants():
            print(f"{tenant.name}: {num_documents} documents")
            for key in keys:
                revoked = "" if key.revoked_at is None else f", revoked {key.revoked_at:%Y-%m-%d}"
                print(f"  key {key.id}: {key.hint}..., made {key.created_at:%Y-%m-%d}{revoked}")


@_key_app.command("add")
def add_key(tenant: Annotated[str, typer.Argument(help="Its name.")], config: Config = None) -> None:
    """Make a further key of a tenant and print it; it is not shown again."""
    with _store(config) as store:
        print(store.add_key(tenant))


@_key_app.command("revoke")
def revoke_key(
    key_id: Annotated[int, typer.Argument(help="Its number, as `tenant list` shows it.")],
    config: Config = None,
) -> None:
    """Make a key worthless, at once."""
    with _store(config) as store:
        store.revoke_key(key_id)
    print(f"key {key_id} is revoked")


@admin_app.command("reindex")
def reindex(config: Config = None) -> None:
    """Have all documents cut, embedded and compressed again at the next start.

    After a change of embedding_model or section_tokens, or where the vectors were lost. Stop the service
    first.
    """
    from grkv_sglang.services.rag.service import EMBEDDING_FACT

    with _store(config) as store:
        store.index_again()
        store.set_fact(EMBEDDING_FACT, load(config).embedding_model)
    print("all documents are indexed again at the next start")


@contextmanager
def _store(config: Path | None) -> Iterator[Store]:
    """The database; expected errors end with their message."""
    from grkv_sglang.services.rag.service import open_store
    from grkv_sglang.services.rag.store import StoreError

    try:
        store = open_store(load(config))
        try:
            yield store
        finally:
            store.close()
    except (ConfigError, StoreError) as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(1)
