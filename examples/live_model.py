"""A small agent on a real model: a tool call, a streamed answer, a typed output.

    PERDURE_LIVE_BASE_URL=http://127.0.0.1:11434/v1 PERDURE_LIVE_MODEL=qwen3 python examples/live_model.py
    make live

Speaks Chat Completions. Without an address it looks for a server at the usual local ones (Ollama, vLLM, llama.cpp, LM
Studio). Where none answers it says so, and how to make it run, and ends well; it fails only if a server was there and the
run did not complete. PERDURE_LIVE_KEY names the variable that holds the key, if one is needed.
"""

import asyncio
import json
import os
import sys
import urllib.request
from dataclasses import dataclass

import perdure as p
from perdure.agent import events
from perdure.providers.openai import ChatModel

LOCAL = [f"http://127.0.0.1:{port}/v1" for port in (11434, 8000, 8080, 1234)]


@dataclass
class Report:
    city: str
    degrees: int


@p.tool(effect="observe")
async def thermometer(city: str) -> int:
    """Degrees Celsius in a city right now.

    Args:
        city: name of the city.
    """
    return {"Oslo": 7}.get(city, 21)


def find() -> tuple[str, str] | None:
    """Address and model of a server that answers."""
    given = os.environ.get("PERDURE_LIVE_BASE_URL")
    for url in [given] if given else LOCAL:
        try:
            with urllib.request.urlopen(f"{url}/models", timeout=2) as answer:
                served = [model["id"] for model in json.load(answer)["data"]]
        except (OSError, ValueError, KeyError):
            if given and "PERDURE_LIVE_MODEL" in os.environ:
                return given, os.environ["PERDURE_LIVE_MODEL"]  # it may not list its models
            continue
        chosen = os.environ.get("PERDURE_LIVE_MODEL") or next(iter(served), None)
        if chosen:
            return url, chosen
    return None


async def main() -> int:
    found = find()
    if found is None:
        print("skipped: no model server answers here. Start one, for example `ollama serve` with a small model, or set")
        print("PERDURE_LIVE_BASE_URL and PERDURE_LIVE_MODEL to one that speaks OpenAI's Chat Completions.")
        return 0
    url, name = found
    key = p.Secret.env(os.environ["PERDURE_LIVE_KEY"]) if "PERDURE_LIVE_KEY" in os.environ else None
    agent = p.Agent(
        "live",
        instructions="Ask the thermometer, then report.",
        output=Report,
        tools=[thermometer],
        model=ChatModel(name, base_url=url, api_key=key),
    )
    print(f"asking {name} at {url}")
    async for event in agent.stream("How warm is it in Oslo?"):
        if isinstance(event, events.TextDelta):
            print(event.text, end="", flush=True)
        elif isinstance(event, events.ToolCallEnded):
            print(f"[{event.tool}: {event.outcome}]")
    result = await agent.run("How warm is it in Oslo?")
    print(f"\n{result.output} in {result.turns} turns, {result.usage.input + result.usage.output} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
