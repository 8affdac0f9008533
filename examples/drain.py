"""A prefill worker leaves while answers stream. It finishes what it has.

    pullfill up --detach --prefill 2
    python examples/drain.py [http://127.0.0.1:8000]

`pullfill drain` finds the cluster in .pullfill/ or PULLFILL_STATE_DIR.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id


def prefill_workers() -> list[str]:
    workers = httpx.get(f"{url}/pullfill/status").json()["workers"]
    return [w["instance_id"] for w in workers if (w["role"], w["state"]) == ("prefill", "ready")]


def ask(number: int) -> int:
    prompt = f"{number}: " + "A prompt long enough to be worth sending away. " * 40
    stream = client.completions.create(
        model=model, prompt=prompt, max_tokens=16, stream=True, extra_body={"ignore_eos": True}
    )
    return sum(1 for chunk in stream if chunk.choices[0].finish_reason == "length")


leaving = prefill_workers()[0]
with ThreadPoolExecutor(8) as pool:
    answers = [pool.submit(ask, number) for number in range(16)]
    command = [sys.executable, "-m", "pullfill", "drain", leaving, "--wait"]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    complete = sum(answer.result() for answer in answers)
print(
    f"{complete} of 16 answers are complete; {leaving} is gone: {leaving not in prefill_workers()}"
)
