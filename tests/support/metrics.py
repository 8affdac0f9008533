"""The metrics of our processes, as their modules make them."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from prometheus_client.metrics import MetricWrapperBase

from pullfill.frontend import counters as frontend_metrics
from pullfill.runtime import metrics

MERGED = {"instance_id", "role"}
"""Labels that a frontend adds to what workers report."""
EVERYWHERE = {"pullfill_namespace"}
"""Labels that it adds to all series."""


@cache
def families(*modules: ModuleType) -> dict[str, tuple[str, ...]]:
    """Labels by name of the metrics that these modules make. Those of all, if none is given."""
    found = {}
    for module in modules or (frontend_metrics, metrics):
        for metric in vars(module).values():
            if isinstance(metric, MetricWrapperBase):
                (family,) = metric.describe()
                name = family.name + ("_total" if family.type == "counter" else "")
                found[name] = tuple(metric._labelnames)
    return found


def labels_of_metrics() -> dict[str, set[str]]:
    """Labels by name, as a frontend's page has them."""
    merged = families(metrics)
    return {
        name: {*labels, *EVERYWHERE, *(MERGED if name in merged else ())}
        for name, labels in families().items()
    }
