"""A conversation, streamed. Its second turn finds the first one in the KV cache.

pullfill up --detach
python examples/chat.py [http://127.0.0.1:8000]
"""

import sys

import httpx
from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

messages = [{"role": "system", "content": "You help in a library. " * 60}]
for question in ("Which book is the longest?", "And which one is the shortest?"):
    messages.append({"role": "user", "content": question})
    print(f"user: {question}\nassistant: ", end="")
    answer = ""
    for chunk in client.chat.completions.create(
        model=model, messages=messages, max_tokens=24, stream=True
    ):
        piece = chunk.choices[0].delta.content or ""
        answer += piece
        print(piece, end="", flush=True)
    messages.append({"role": "assistant", "content": answer})

    # How was it served? `pullfill explain ID` tells the same.
    told = httpx.get(f"{url}/pullfill/requests/{chunk.id}").json()
    print(
        f"\n  [{told['prompt_tokens']} prompt tokens: {told['prefix_hit_tokens']} cached, "
        f"{told['remote_tokens']} prefilled remotely]"
    )
