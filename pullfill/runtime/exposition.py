"""The /metrics page of one process, in the format that the scraper asks for.

- OpenMetrics 1.0 for whoever names it in `Accept`, as Prometheus does. Only this format has
  exemplars: the trace ids of single requests beside the buckets that they fell into.
- Prometheus text 0.0.4 for everybody else, such as curl.

Neither has `_created` series. They would double the number of series, and nothing here uses them.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

OPENMETRICS = "application/openmetrics-text"
PLAIN = CONTENT_TYPE_PLAIN_0_0_4
END = "# EOF\n"
"""The last line of an OpenMetrics page. A page without it was cut off."""

# For all metrics of the process, vLLM's too.
disable_created_metrics()  # type: ignore[no-untyped-call]


def wants_openmetrics(accept: str) -> bool:
    """Return whether an `Accept` header names OpenMetrics."""
    return OPENMETRICS in accept


def page(accept: str) -> tuple[bytes, str]:
    """Return all metrics of this process, and their content type.

    accept: the header of the request. Empty: plain text."""
    if wants_openmetrics(accept):
        # The default escaping makes `vllm_x` of `vllm:x` here, though not in plain text.
        generate: Any = openmetrics.generate_latest
        body: bytes = generate(REGISTRY, escaping=openmetrics.ALLOWUTF8)
        return body, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(REGISTRY), PLAIN
