"""One metrics page of the metrics of all processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pullfill.frontend.cluster_view import MergedMetrics

OWN = """# HELP up_total Things
# TYPE up_total counter
up_total{model="m"} 3.0
# HELP pullfill_h Times
# TYPE pullfill_h histogram
pullfill_h_bucket{le="1.0"} 1.0
pullfill_h_bucket{le="+Inf"} 1.0
pullfill_h_count 1.0
pullfill_h_sum 0.5
"""
WORKER = """# HELP pullfill_h Times
# TYPE pullfill_h histogram
pullfill_h_bucket{le="1.0"} 2.0
pullfill_h_bucket{le="+Inf"} 2.0
pullfill_h_count 2.0
pullfill_h_sum 0.25
# HELP pullfill_queue_depth_jobs Jobs
# TYPE pullfill_queue_depth_jobs gauge
pullfill_queue_depth_jobs 4.0
# HELP vllm:tokens_total Tokens of a step
# TYPE vllm:tokens_total histogram
vllm:tokens_total_bucket{le="+Inf"} 2.0
vllm:tokens_total_count 2.0
vllm:tokens_total_sum 3.0
"""


def merge_metrics(*parts: tuple[dict[str, str], str]) -> str:
    merged = MergedMetrics()
    for labels, text in parts:
        merged.add(labels, text)
    return merged.text()


@pytest.mark.essential
def test_merged_metrics_have_each_family_once_and_say_whose_sample_it_is() -> None:
    one = {"instance_id": "decode-1", "role": "decode"}
    two = {"instance_id": 'odd"\\name', "role": "prefill"}
    text = merge_metrics(({}, OWN), (one, WORKER), (two, WORKER))
    assert text.count("# TYPE pullfill_h histogram") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    depth = families["pullfill_queue_depth_jobs"].samples
    assert {(s.labels["instance_id"], s.labels["role"], s.value) for s in depth} == {
        ("decode-1", "decode", 4.0),
        ('odd"\\name', "prefill", 4.0),
    }
    buckets = [s for s in families["pullfill_h"].samples if s.name == "pullfill_h_bucket"]
    assert len(buckets) == 6
    assert {s.labels.get("role") for s in buckets} == {None, "decode", "prefill"}
    assert families["up"].samples[0].labels == {"model": "m"}
    # vLLM has a histogram that is called `total`. Its samples stay below its own header.
    assert text.index("# TYPE vllm:tokens_total") < text.index("vllm:tokens_total_bucket")
    total = families["vllm:tokens_total"]
    assert (total.type, len(total.samples)) == ("histogram", 6)


@given(st.lists(st.text(max_size=60), max_size=8))
def test_no_text_of_a_worker_spoils_the_page(lines: list[str]) -> None:
    text = merge_metrics(({}, OWN), ({"instance_id": "i", "role": "decode"}, "\n".join(lines)))
    own = [line for line in OWN.splitlines() if not line.startswith("#")]
    assert set(own) <= set(text.splitlines())
    assert text.count("# TYPE up_total counter") == 1
