"""A client whose model calls Python functions, with OpenAI's own package.

    pip install openai
    python examples/client_with_tools/client.py --url http://127.0.0.1:8000/v1 "How is the weather in Oslo?"

The model asks for a call, this program runs it, and the model answers with the result. `tool_choice="required"` makes the first
answer a call whose arguments match the schema, whatever the model is: the server enforces it.
"""

import argparse
import json

from openai import OpenAI

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}},
    "required": ["city"],
    "additionalProperties": False,  # a small model would go on inventing more of them
}


def weather(city: str) -> str:
    return f"{city}: 4 degrees, rain"  # a real program asks a weather service


FUNCTIONS = {"weather": weather}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather in a city, now.", "parameters": CITY}}
]


def answer(client: OpenAI, model: str, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    first = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    messages.append(first.choices[0].message)
    for call in first.choices[0].message.tool_calls:
        arguments = json.loads(call.function.arguments)
        print(f"called {call.function.name}({arguments})")
        result = FUNCTIONS[call.function.name](**arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    last = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=64)
    return last.choices[0].message.content


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--url", default="http://127.0.0.1:8000/v1")
    options.add_argument("--model", default="smollm2")
    options.add_argument("question", nargs="?", default="How is the weather in Oslo?")
    given = options.parse_args()
    print(answer(OpenAI(base_url=given.url, api_key="none"), given.model, given.question))
