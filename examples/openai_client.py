"""The openai library against a cluster: a streamed answer, a tool call, and an answer of a JSON schema.

::

    pip install openai
    python examples/openai_client.py                              # the node of this machine
    python examples/openai_client.py http://192.168.1.20:8117/v1  # another node; its key in OPENAI_API_KEY
"""

from __future__ import annotations

import argparse
import json
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.shared_params import ResponseFormatJSONSchema

MAX_TOKENS = 400

WEATHER: dict[str, str] = {"Lima": "19 degrees, mist", "Oslo": "-3 degrees, snow"}
WEATHER_TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(WEATHER)}},
            "required": ["city"],
        },
    },
}
CITY: ResponseFormatJSONSchema = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},  # bounds keep the answer shorter than MAX_TOKENS
                "country": {"type": "string", "maxLength": 20},
                "inhabitants": {"type": "integer", "minimum": 0, "maximum": 50_000_000},
            },
            "required": ["name", "country", "inhabitants"],
        },
    },
}


def stream(client: OpenAI, model: str) -> None:
    """Print an answer while it comes."""
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}],
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n({chunk.usage.completion_tokens} tokens)")


def call_tool(client: OpenAI, model: str) -> None:
    """Let the model call a function and answer with its result."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[WEATHER_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=MAX_TOKENS,
        temperature=0,
    )
    calls = [call for call in asked.choices[0].message.tool_calls or () if call.type == "function"]
    messages.append(
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in calls
            ],
        }
    )
    for call in calls:
        city = json.loads(call.function.arguments)["city"]
        print(f"{call.function.name}({city!r}) -> {WEATHER[city]}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER[city]})
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=MAX_TOKENS, temperature=0)
    print(answer.choices[0].message.content)


def fill_schema(client: OpenAI, model: str) -> None:
    """Ask for JSON of a schema; every complete answer fits it."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Describe Lima as JSON: name, country, inhabitants."}],
        response_format=CITY,
        max_tokens=MAX_TOKENS,
        temperature=0,
    )
    city = json.loads(answer.choices[0].message.content or "")
    print(f"{city['name']} in {city['country']} has {city['inhabitants']} inhabitants")


def main() -> None:
    """Run the three requests."""
    parser = argparse.ArgumentParser(description="Ask a cluster through the openai library.")
    parser.add_argument("base_url", nargs="?", default="http://127.0.0.1:8117/v1")
    parser.add_argument("--model", help="a model of 'edgepipe models list' (default: the first that is served)")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = arguments.model or next((served.id for served in client.models.list()), None)
    if model is None:
        parser.error("no model is served; type: edgepipe serve MODEL")
    for title, run in (("stream", stream), ("tool call", call_tool), ("JSON schema", fill_schema)):
        print(f"--- {title}")
        run(client, model)


if __name__ == "__main__":
    main()
