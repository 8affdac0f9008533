"""Offline batch inference: answers a file of requests, several at a time.

    pullfill up --detach --prefill 2
    python examples/batch.py examples/batch.jsonl answers.jsonl [http://127.0.0.1:8000]

The files have OpenAI's batch format. Run it again after a break: it answers what is missing.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import APIError, OpenAI

AT_ONCE = 16
asked, answers = Path(sys.argv[1]), Path(sys.argv[2])
url = sys.argv[3] if len(sys.argv) > 3 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def answer(line: dict) -> str | None:
    try:
        path, body = line["url"].removeprefix("/v1"), {**line["body"], "model": model}
        reply = client.post(path, body=body, cast_to=object)
    except APIError as error:
        print(f"{line['custom_id']}: {error}", file=sys.stderr)
        return None
    return json.dumps({"custom_id": line["custom_id"], "response": {"body": reply}})


done = {line["custom_id"] for line in lines(answers)}
todo = [line for line in lines(asked) if line["custom_id"] not in done]
good = 0
with ThreadPoolExecutor(AT_ONCE) as pool, answers.open("a") as out:
    for reply in pool.map(answer, todo):
        if reply is not None:
            good += 1
            print(reply, file=out, flush=True)
print(f"{good} answered, {len(todo) - good} failed, {len(done)} were there: {answers}")
