"""What a server will read before it starts: entry points, configuration, its port."""

from __future__ import annotations

import errno
import importlib.metadata
import socket
from collections.abc import Mapping

from grkv_sglang.commands.doctor.findings import Finding
from grkv_sglang.config import ENV_PREFIX, GrkvConfig, load_config
from grkv_sglang.settings import ConfigError

ENTRY_POINTS = (("sglang.srt.plugins", "grkv"), ("sglang.srt.platforms", "grkv_cpu"))
PLUGINS_ENV = "SGLANG_PLUGINS"


def check_entry_points(environment: Mapping[str, str]) -> list[Finding]:
    """Whether SGLang will find the plugin, and its platform for machines without a GPU."""
    findings = []
    for group, name in ENTRY_POINTS:
        if name in importlib.metadata.entry_points(group=group).names:
            findings.append(Finding("ok", "entry point", f"{name} in {group}"))
        else:
            todo = "install the package again"
            findings.append(Finding("problem", "entry point", f"{name} is not in {group}", todo))
    chosen = environment.get(PLUGINS_ENV)
    if chosen is not None and "grkv" not in {name.strip() for name in chosen.split(",")}:
        found = f"{chosen!r} leaves the plugin out"
        findings.append(Finding("problem", PLUGINS_ENV, found, "add grkv to it, or unset it"))
    return findings


def check_config(environment: Mapping[str, str]) -> list[Finding]:
    """File and environment, read as a server reads them."""
    names = sorted(name for name in environment if name.startswith(ENV_PREFIX))
    source = ", ".join(names) if names else "defaults"
    try:
        config = load_config(environment)
    except ConfigError as error:
        return [Finding("problem", "configuration", str(error), f"correct or unset {source}")]
    return [Finding("ok", "configuration", f"valid ({source})"), *_settings_that_do_nothing(config)]


def _settings_that_do_nothing(config: GrkvConfig) -> list[Finding]:
    findings = []
    if not config.compression or not config.triggers:
        which = "COMPRESSION" if not config.compression else "TRIGGERS"
        found = f"{which.lower()} is {'off' if not config.compression else 'empty'}: no spans are made"
        findings.append(Finding("warning", "configuration", found, f"set {ENV_PREFIX}{which}"))
    try:
        from grkv_sglang.core import get_profile
    except ImportError:
        return findings  # without torch; the versions tell
    try:
        get_profile(config.profile)
    except ValueError as error:
        todo = f"set {ENV_PREFIX}PROFILE, or profile in the file"
        findings.append(Finding("problem", "configuration", f"profile: {error}", todo))
    return findings


def check_port(port: int) -> Finding:
    """Whether a server could listen there."""
    with socket.socket() as listener:
        # As servers do: a connection that was closed a moment ago does not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return Finding("problem", f"port {port}", str(error), "choose another one with --port")
            todo = "if that is your server, give --url; else choose another one with --port"
            return Finding("warning", f"port {port}", "is in use", todo)
    return Finding("ok", f"port {port}", "is free")
