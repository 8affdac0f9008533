"""The model calls a function, gets its result, and answers.

pullfill up --detach
python examples/tools.py [http://127.0.0.1:8000]
"""

import json
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id


def weather(city: str, days: int) -> str:
    return f"In {city} the sun shines for {days} days."


tool = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of the next days",
        "strict": True,  # the answer follows the schema, even with the demo model
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Oslo", "Lima", "Pune"]},
                "days": {"type": "integer", "enum": [1, 2, 3]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
messages = [{"role": "user", "content": "Can I hike in Lima this week?"}]
# The demo model never decides to call. A real model does: leave tool_choice out.
answer = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[tool],
    tool_choice={"type": "function", "function": {"name": "weather"}},
    temperature=0,
    max_tokens=200,
)
call = answer.choices[0].message.tool_calls[0]
result = weather(**json.loads(call.function.arguments))
print(f"the model calls {call.function.name}({call.function.arguments.strip()}) -> {result}")

messages.append({"role": "assistant", "tool_calls": [call.model_dump()]})
messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
answer = client.chat.completions.create(model=model, messages=messages, max_tokens=24)
print("assistant:", answer.choices[0].message.content)
