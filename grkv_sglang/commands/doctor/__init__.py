"""`grkv doctor`: is everything as the plugin needs it, and if not, what to do. Works without a server and
without a GPU; changes nothing.

Every check gives findings, also where it cannot be made. torch and SGLang are imported where they are looked
at: that one of them is missing is what the doctor may be asked about.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console

from grkv_sglang.client import GrkvClient
from grkv_sglang.commands.doctor.findings import Finding, print_finding
from grkv_sglang.commands.doctor.machine import check_contracts, check_device
from grkv_sglang.commands.doctor.model import check_model
from grkv_sglang.commands.doctor.server import check_server
from grkv_sglang.commands.doctor.setup import check_config, check_entry_points, check_port
from grkv_sglang.commands.doctor.versions import check_versions
from grkv_sglang.config import GrkvConfig, load_config
from grkv_sglang.settings import ConfigError


@dataclass(frozen=True)
class DoctorSettings:
    """What is looked at.

    Attributes:
        environment: where the configuration is read from.
        port: that a server is to listen on; not looked at where there is a client.
        client, url: of a running server.
        model: a checkpoint folder or a name on Hugging Face.
        memory_gib: GiB for KV, to say what fits; None: what the first GPU has free beside the weights.
        budget: kept share of a document's tokens; None: that of the configuration.
    """

    environment: Mapping[str, str]
    port: int = 30000
    client: GrkvClient | None = None
    url: str = ""
    model: str | None = None
    memory_gib: float | None = None
    budget: float | None = None


def run_doctor(settings: DoctorSettings, console: Console) -> bool:
    """Print every finding as it comes, then a count; whether there is no problem."""
    found: list[Finding] = []
    for name, check in _checks(settings):
        with console.status(f"looking at {name}"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SGLang's, about what this machine has not, while it is imported
            findings = check()
        for finding in findings:
            print_finding(finding, console)
        found += findings
    problems, doubts = (sum(f.level == level for f in found) for level in ("problem", "warning"))
    console.print(f"problems: {problems}, warnings: {doubts}", style="red" if problems else "green")
    return problems == 0


def _checks(settings: DoctorSettings) -> Iterator[tuple[str, Callable[[], list[Finding]]]]:
    environment, client, model = settings.environment, settings.client, settings.model
    yield "versions", check_versions
    yield "entry points", lambda: check_entry_points(environment)
    yield "the configuration", lambda: check_config(environment)
    yield "the device", check_device
    yield "SGLang, which takes a while to import", check_contracts
    if client is None:
        yield "the port", lambda: [check_port(settings.port)]
    else:
        yield "the server", lambda: check_server(client, settings.url)
    if model is not None:
        budget = settings.budget or _configured_budget(environment)
        yield "the model", lambda: check_model(model, memory_gib=settings.memory_gib, budget=budget)


def _configured_budget(environment: Mapping[str, str]) -> float:
    try:
        return load_config(environment).budget
    except ConfigError:  # a finding of its own
        return GrkvConfig().budget
