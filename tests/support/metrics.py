"""The metrics of our processes, as their modules make them."""

from __future__ import annotations

from functools import cache

from prometheus_client.metrics import MetricWrapperBase

from pullfill.frontend import counters as frontend_metrics
from pullfill.runtime import metrics

MERGED = {"instance_id", "role"}
"""Labels that a frontend adds to what workers report."""
EVERYWHERE = {"pullfill_namespace"}
"""Labels that it adds to all series."""


@cache
def labels_of_metrics() -> dict[str, set[str]]:
    """Labels by name, as a frontend's page has them."""
    found = {}
    for module, more in ((frontend_metrics, set[str]()), (metrics, MERGED)):
        for metric in vars(module).values():
            if isinstance(metric, MetricWrapperBase):
                (family,) = metric.describe()
                name = family.name + ("_total" if family.type == "counter" else "")
                found[name] = set(metric._labelnames) | more | EVERYWHERE
    return found
