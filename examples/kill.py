"""A prefill worker is killed while it works. No request fails.

    pullfill up --detach --prefill 2
    python examples/kill.py [http://127.0.0.1:8000 [PID]]

Run it on the machine of the cluster. PID: of the worker. `pullfill up` starts one of its own again.
"""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
workers = httpx.get(f"{url}/pullfill/status").json()["workers"]
prefill = {w["pid"]: w["instance_id"] for w in workers if w["role"] == "prefill"}
victim = int(sys.argv[2]) if len(sys.argv) > 2 else max(prefill)


def ask(number: int) -> str:
    prompt = f"{number}: " + "A prompt long enough to be worth sending away. " * 40
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=8)
    if number == 8:
        print(f"killing {prefill[victim]}")
        os.kill(victim, signal.SIGKILL)
    return answer.id


with ThreadPoolExecutor(8) as pool:
    ids = list(pool.map(ask, range(32)))
told = [httpx.get(f"{url}/pullfill/requests/{i}").json() for i in ids]
remote = sum(t["path"] == "remote" for t in told)
again = sum(t["attempts"] > 1 for t in told)
print(f"{len(ids)} answers: {remote} prefilled remotely, {again} of them tried twice")
