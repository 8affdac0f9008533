"""`pullfill explain`: how one request was served, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import quote

import msgspec
from rich.console import Console, Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from pullfill.config import ClusterRef
from pullfill.deploy.members import (
    AsJson,
    ask_etcd,
    ask_frontend,
    ask_worker,
    frontend_urls,
    workers,
)
from pullfill.errors import ConfigError, PullfillError, UnavailableError
from pullfill.net import http_proof
from pullfill.options import Flag
from pullfill.snapshot import Explained
from pullfill.wire import Expected, ExplainRecord, PredictedMs

# Characters of the longest bar.
_BAR = 40
_CERTIFICATE = (
    "name your own authority with SSL_CERT_FILE=ca.pem, and start the frontend with --advertise "
    "https://NAME, a name that its certificate has"
)


def explain(
    ref: ClusterRef,
    request_id: Annotated[str, Flag("", name="REQUEST_ID")],
    as_json: AsJson = False,
) -> int:
    """Print how a request was served.

    request_id: the `id` of its answer, or its X-Request-Id.

    Raises ConfigError if no frontend and no decode worker knows it, and UnavailableError if none of
    them answers."""
    answered = False
    silent: list[str] = []
    for record in _told(ref, request_id, silent):
        answered = True
        if record is not None:
            if as_json:
                print(json.dumps(msgspec.to_builtins(record)))
            else:
                Console().print(trace(record), soft_wrap=True, highlight=False)
            return 0
    why = "; ".join(silent)
    if not answered:
        raise UnavailableError(
            f"neither a frontend nor a decode worker answers ({why or 'none is known'}): "
            + (_CERTIFICATE if "CERTIFICATE" in why else "try `pullfill doctor`")
        )
    raise ConfigError(
        f"no frontend and no decode worker knows request {request_id!r}: use the `id` of an "
        "answer, or the X-Request-Id of a request; only the latest are kept, and not across a "
        "restart of the process" + (f". No answer: {why}" if why else "")
    )


def _told(ref: ClusterRef, request_id: str, silent: list[str]) -> Iterator[Explained | None]:
    """Yield what each frontend knows of the request, then what each decode worker knows.

    silent: gets a line about each that does not answer. Raises ConfigError if a frontend wants a
    key."""
    name = quote(request_id, safe="")
    for url in frontend_urls(ref):
        try:
            code, body = ask_frontend(ref, url, f"/pullfill/requests/{name}")
        except UnavailableError as exc:
            silent.append(str(exc))
            continue
        if code == 401:
            raise ConfigError(
                f"the frontend at {url} wants an API key: name the --security file that has it as "
                "[frontend] api_key_file. If it has, check the clocks of both machines: "
                f"they may differ by {http_proof.VALID_S} s at most"
            )
        yield msgspec.convert(body, Explained) if code == 200 and body is not None else None
    try:
        known = ask_etcd(ref, workers, wait_s=1.0)
    except PullfillError as exc:
        silent.append(f"etcd, so no decode worker is known: {exc}")
        return
    for worker in known:
        if worker.role == "decode":
            report = ask_worker(worker, f"?request={name}")
            if report is None:
                silent.append(f"{worker.instance_id} does not answer")
            else:
                yield report.request


def trace(record: Explained) -> Group:
    """Return what happened to one request in words, and a bar for each stage."""
    return Group(*_outcome(record), *_lines(record), _bars(record), *_others(record))


def _outcome(record: Explained) -> Iterator[Text]:
    yield Text(f"request {record.request_id}", style="bold")
    if record.state == "failed":
        begun = " (after its answer had begun)" if record.status == 200 else ""
        begun = f" (HTTP {record.status})" if record.status not in (0, 200) else begun
        yield Text(f"  failed{begun}: {record.error or 'no reason is known'}", style="red")
    elif record.state == "running":
        yield Text("  still running")
    elif record.state == "cancelled":
        yield Text("  cancelled: its client left before the answer was complete")


def _others(record: Explained) -> Iterator[Text]:
    """Its other prompts, choices and beams."""
    if record.parts:
        kept = f", and {record.more_parts} that are not kept" if record.more_parts else ""
        yield Text(f"  other prompts, choices or beams: {len(record.parts)}{kept}", style="bold")
    for part in record.parts:
        why = f"failed: {part.error}" if part.error else _what_happened(part)
        yield Text(f"    {part.request_id}: {part.prompt_tokens} tokens, {why}")


def _lines(record: ExplainRecord) -> Iterator[Text]:
    yield Text(f"  {_what_happened(record)}")
    if record.path == "none":
        return
    if record.stages:
        yield from _stages(record)
        return
    if record.path == "unknown":
        yield Text(f"  prompt: {record.prompt_tokens} tokens")
    else:
        here = record.prefix_hit_tokens + record.fetched_tokens
        local = max(0, record.prompt_tokens - here - record.remote_tokens)
        off = f" ({record.offloaded_tokens} offloaded)" if record.offloaded_tokens else ""
        fetched = f" + {record.fetched_tokens} fetched" if record.fetched_tokens else ""
        yield Text(
            f"  prompt: {record.prompt_tokens} tokens = {record.prefix_hit_tokens} cached{off}"
            f"{fetched} + {record.remote_tokens} prefilled remotely + {local} locally"
        )
    yield Text(f"  decode worker: {record.decode_instance}")
    if (choice := record.decode_choice) is not None:
        cost = "" if choice.score is None else f"; cost {choice.score:g} tokens"
        yield Text(
            f"    chosen by policy {choice.policy} (reason: {choice.reason}): the frontend knew of "
            f"{choice.matched_tokens} cached tokens there{cost}"
        )
    if record.fetch is not None:
        yield Text(f"  prefix held by {record.fetched_from}: {record.fetch}")
    if record.expected_s is not None:
        yield Text(f"  expected: {_expected(record.expected_s)}")
    if record.predicted_ms is not None:
        yield Text(f"  first token after the decision: {_predicted(record, record.predicted_ms)}")
    if record.outage:
        yield Text(f"  at that time: {record.outage}", style="red")
    if record.migrated_from:
        out = f", from {record.migrated_tokens} tokens on" if record.migrated_tokens else ""
        yield Text(f"  continued after: {', '.join(record.migrated_from)}{out}")
    if record.prefill_instance:
        plural = "" if record.attempts == 1 else "s"
        yield Text(
            f"  prefill worker: {record.prefill_instance} ({record.attempts} attempt{plural})"
        )
    if record.kv_bytes:
        over = f" over {record.transport}" if record.transport else ""
        yield Text(f"  KV written into decode memory: {decimal(record.kv_bytes)}{over}")
        for reason in record.why_not_better:
            yield Text(f"    not over {reason}", style="dim")


def _stages(record: ExplainRecord) -> Iterator[Text]:
    """What stock vLLM servers did."""
    if record.prompt_tokens:
        yield Text(f"  prompt: {record.prompt_tokens} tokens")
    for each in record.stages:
        style = "" if each.result == "ok" else "red"
        span = f"{each.begin_ms:.0f} to {each.end_ms:.0f} ms"
        yield Text(f"  {each.stage} at {each.server}, {span}: {each.result}", style=style)
        if each.choice is not None:
            yield Text(f"    chosen by policy {each.choice.policy} (reason: {each.choice.reason})")


def _what_happened(record: ExplainRecord) -> str:
    if record.stages:
        return f"served by stock vLLM servers: {record.path} (reason: {record.reason})"
    if record.path == "none":
        return "sent to no decode worker"
    if record.path == "unknown" and record.reason:
        return f"its remote prefill has not ended (reason: {record.reason})"
    if record.path == "unknown":
        return "its decode worker has not told how it was prefilled"
    if record.path == "remote":
        return f"prefilled by a prefill worker (reason: {record.reason})"
    if record.fallback:
        return f"sent to be prefilled remotely, then done locally: {record.fallback}"
    return f"prefilled by the decode worker itself (reason: {record.reason})"


def _expected(told: Expected) -> str:
    parts = (
        ("in the queue", told.queue),
        ("to compute", told.prefill),
        ("to write the KV", told.kv_write),
    )
    said = [f"{s:.2f} s {what}" if s is not None else f"? s {what}" for what, s in parts]
    return f"{', '.join(said)}; given up after {told.timeout:.0f} s"


def _predicted(record: ExplainRecord, told: PredictedMs) -> str:
    parts = (("remote", told.remote), ("local", told.local))
    said = [f"{what} {ms:.0f} ms" for what, ms in parts if ms is not None]
    was = "" if record.outcome_ms is None else f"; it was {record.outcome_ms:.0f} ms"
    return f"{', '.join(said)} expected{was}"


def _bars(record: ExplainRecord) -> Table:
    stages = msgspec.structs.asdict(record.timings_ms)
    known = {name: ms for name, ms in stages.items() if ms is not None}
    longest = max(known.values(), default=0.0) or 1.0
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    for name, ms in known.items():
        style = "bold" if name == "first_token" else "cyan"
        bar = Text("█" * max(1, round(_BAR * ms / longest)) if ms > 0 else "", style=style)
        table.add_row(f"  {name}", f"{ms:.1f} ms", bar)
    return table
