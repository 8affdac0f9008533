"""`python -m pullfill.deploy.dashboard`: writes deploy/prometheus/dashboard.json for Grafana.

The file is made, never edited. `tests/unit/deploy/test_dashboard.py` checks that it is what this
module makes, and that every metric in it exists. `tests/integration/test_prometheus.py` sends each
query to a Prometheus that scrapes a cluster.

Needs `grafana-foundation-sdk`, which `make install` brings for developers.

Each frontend's page shows all workers. So a worker's metric is counted once, by `max by
(instance_id, ...)`, before anything is summed. A frontend's own metrics and vLLM's are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

FILE = Path(__file__).resolve().parent / "prometheus" / "dashboard.json"
RATE = "$__rate_interval"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True, slots=True)
class Query:
    """A line, or one line for each label value.

    legend: may hold `{{label}}`."""

    text: str
    legend: str


@dataclass(frozen=True, slots=True)
class Plot:
    """One panel. unit: in Grafana's words."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str = ""


def worker_rate(metric: str, *by: str) -> str:
    """Return the rate of a worker's counter, summed over workers."""
    inner = ", ".join(("instance_id", *by))
    outer = f" by ({', '.join(by)})" if by else ""
    return f"sum{outer} (max by ({inner}) (rate({metric}[{RATE}])))"


def frontend_rate(metric: str, *by: str) -> str:
    """Return the rate of a frontend's counter, summed over frontends."""
    outer = f" by ({', '.join(by)})" if by else ""
    return f"sum{outer} (rate({metric}[{RATE}]))"


def quantiles(metric: str, *shares: float) -> tuple[Query, ...]:
    """Return quantiles of one of vLLM's histograms."""
    buckets = frontend_rate(f"{metric}_bucket", "le")
    return tuple(Query(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in shares)


def worst(metric: str, *by: str) -> str:
    """Return a worker's gauge. Several frontends tell the same of it."""
    return f"max by ({', '.join(by or ('instance_id',))}) ({metric})"


def stage(share: float) -> str:
    """Return a quantile of the time in each stage of a remote prefill."""
    buckets = worker_rate("pullfill_handoff_stage_seconds_bucket", "le", "stage")
    return f"histogram_quantile({share}, {buckets})"


def one(title: str, unit: str, query: str, legend: str, text: str = "") -> Plot:
    """Return a panel with one query."""
    return Plot(title, unit, (Query(query, legend),), text)


DECODE = '{role="decode"}'
_P = (0.5, 0.95, 0.99)
ROWS: dict[str, tuple[Plot, ...]] = {
    "Requests": (
        one(
            "Prompts by decision", "reqps",
            worker_rate("pullfill_decision_total", "path", "reason"), "{{path}}: {{reason}}",
            "Where prompts were prefilled, and why.",
        ),
        Plot("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds", *_P)),
        Plot("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds", *_P)),
        Plot(
            "Tokens", "short",
            (
                Query(frontend_rate("vllm:generation_tokens_total"), "generated per second"),
                Query(frontend_rate("vllm:prompt_tokens_total"), "prompt per second"),
            ),
        ),
        one("In flight", "short", "sum (pullfill_frontend_in_flight)", "requests"),
        one(
            "Choice of decode workers", "reqps",
            frontend_rate("pullfill_decode_choice_total", "policy", "reason"),
            "{{policy}}: {{reason}}",
        ),
    ),
    "Queue": (
        one("Jobs", "short", "max (pullfill_queue_depth_jobs)", "pending or in flight"),
        one("Prompt tokens of jobs", "short", "max (pullfill_queue_depth_tokens)", "tokens"),
        one("Oldest job", "s", "max (pullfill_queue_oldest_age_seconds)", "age"),
        one(
            "Work that waits", "s",
            f"sum ({worst('pullfill_backlog_seconds' + DECODE)})", "seconds of prefill",
            "Seconds that the prefill workers need for all open jobs.",
        ),
        one(
            "Prefill workers that long prompts keep busy", "short",
            f"sum ({worst('pullfill_prefill_demand' + DECODE)})", "workers",
        ),
        one(
            "Pressure of decode workers", "percentunit",
            worst("pullfill_decode_pressure" + DECODE), "{{instance_id}}",
        ),
    ),
    "Remote prefills": (
        one("Stages, median", "s", stage(0.5), "{{stage}}"),
        one("Stages, p95", "s", stage(0.95), "{{stage}}"),
        one(
            "KV written", "Bps",
            worker_rate("pullfill_kv_write_bytes_total", "transport"), "{{transport}}",
        ),
        one(
            "KV read", "Bps",
            worker_rate("pullfill_kv_read_bytes_total", "transport"), "{{transport}}",
        ),
        one(
            "KV computed and not delivered", "bytes",
            worst("pullfill_kv_credits_bytes", "instance_id", "what"), "{{instance_id}} {{what}}",
        ),
        one(
            "Prefixes read from other decode workers", "reqps",
            worker_rate("pullfill_prefix_fetch_total", "outcome"), "{{outcome}}",
        ),
    ),
    "Faults": (
        one("Servers that answer all", "short", "min by (server) (pullfill_up)", "{{server}}"),
        one(
            "Remote prefills done locally after all", "reqps",
            worker_rate("pullfill_fallback_total", "cause"), "{{cause}}",
        ),
        one(
            "Claims", "reqps",
            worker_rate("pullfill_claim_total" + DECODE, "result"), "{{result}}",
        ),
        one(
            "Blocks in quarantine", "short",
            worst("pullfill_quarantined_blocks" + DECODE), "{{instance_id}}",
        ),
        Plot(
            "Answers that lost their decode worker", "reqps",
            (
                Query(frontend_rate("pullfill_frontend_migrated_total", "result"), "{{result}}"),
                Query(frontend_rate("pullfill_frontend_failed_total"), "failed"),
            ),
        ),
        Plot(
            "Refused", "reqps",
            (
                Query(frontend_rate("pullfill_frontend_refused_total", "reason"), "{{reason}}"),
                Query(worker_rate("pullfill_auth_refused_total", "link"), "no key: {{link}}"),
                Query(worker_rate("pullfill_dead_letter_total"), "dead letter"),
            ),
        ),
    ),
}  # fmt: skip


def make() -> str:
    """Return the dashboard as JSON text."""
    made = (
        dashboard.Dashboard("pullfill")
        .uid("pullfill")
        .tags(["pullfill"])
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    )
    for title, plots in ROWS.items():
        made = made.with_row(dashboard.Row(title))
        for plot in plots:
            made = made.with_panel(_panel(plot))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def _panel(plot: Plot) -> timeseries.Panel:
    panel = timeseries.Panel().title(plot.title).unit(plot.unit).datasource(_SOURCE)
    panel = panel.description(plot.text).span(8).height(7).min(0)
    for number, query in enumerate(plot.queries):
        target = prometheus.Dataquery().expr(query.text).legend_format(query.legend)
        # Only this histogram has exemplars: dots that lead to traces.
        dots = "pullfill_handoff_stage" in query.text
        target = target.exemplar(dots).ref_id(chr(ord("A") + number))
        panel = panel.with_target(target.datasource(_SOURCE))
    return panel


def main() -> None:
    FILE.write_text(make())
    print(FILE)


if __name__ == "__main__":
    main()
