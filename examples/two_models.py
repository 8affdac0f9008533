"""Two models over the same NATS and etcd: a namespace each, and a frontend each.

    python examples/two_models.py [MODEL MODEL]

It starts both clusters itself. Two machines would do the same with `pullfill up --etcd URL --nats
URL --namespace NAME`.
"""

import sys

from openai import OpenAI

from pullfill.testing import cluster

first, second = sys.argv[1:3] if len(sys.argv) > 2 else ("demo", "demo")
with (
    cluster(model=first, served_model_name="large") as large,
    cluster(
        *large.servers,
        "--namespace=small",
        model=second,
        served_model_name="small",
        prefill=0,  # too small to be worth a prefill worker
    ) as small,
):
    clients = {c.model: OpenAI(base_url=c.base_url, api_key="none") for c in (large, small)}
    for model, client in clients.items():
        answer = client.completions.create(model=model, prompt="word " * 600, max_tokens=8)
        place = {"large": large, "small": small}[model]
        print(f"{model} at {place.url}: path {place.explain(answer.id)['path']}")
