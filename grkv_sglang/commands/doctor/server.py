"""A running server, if one was named."""

from __future__ import annotations

from grkv_sglang.client import GrkvApiError, GrkvClient, GrkvError, GrkvState
from grkv_sglang.commands.doctor.findings import Finding
from grkv_sglang.config import RADIX_BACKEND
from grkv_sglang.contract import TESTED_SGLANG


def check_server(client: GrkvClient, url: str) -> list[Finding]:
    """Whether it answers, is the SGLang that the plugin was written against, and runs the plugin."""
    topic = f"server {url}"
    if not client.health():
        return [Finding("problem", topic, "does not answer its health check", "start it, or see its log")]
    try:
        version = client.get("/server_info").get("version")
    except (GrkvError, AttributeError) as error:
        return [Finding("problem", topic, str(error), "is it SGLang? give --api-key if it has one")]
    findings = []
    if version == TESTED_SGLANG:
        findings.append(Finding("ok", topic, f"SGLang {version}"))
    else:
        todo = f"pip install 'sglang=={TESTED_SGLANG}' there"
        findings.append(Finding("problem", topic, f"SGLang {version}", todo))
    try:
        return [*findings, *state_findings(topic, client.state())]
    except GrkvError as error:
        missing = isinstance(error, GrkvApiError) and error.status == 404
        todo = f"start it with --radix-cache-backend {RADIX_BACKEND}" if missing else "give its admin key"
        return [*findings, Finding("problem", topic, str(error), todo)]


def state_findings(topic: str, state: GrkvState) -> list[Finding]:
    """What the plugin says of itself."""
    pool, settings = state.pool, state.config
    found = (
        f"{state.num_spans} spans; {pool.free_slots:,} of {pool.total_slots:,} slots free; "
        f"budget {settings.get('budget')}, profile {settings.get('profile')}"
    )
    findings = [Finding("ok", topic, found)]
    if not state.census.ok:
        found = f"census: {state.census.last_error}"
        findings.append(Finding("problem", topic, found, "report this as a bug of grkv_sglang"))
    failed = state.counters.compressions_failed
    if failed:
        reasons = ", ".join(f"{name} {count}" for name, count in sorted(failed.items()))
        todo = "docs/operations.md says what each means"
        findings.append(Finding("warning", topic, f"failed compressions: {reasons}", todo))
    return findings
