"""A real model behind any server that speaks OpenAI's Chat Completions format.

    pip install ".[models]"
    EXAMPLE_BASE_URL=http://127.0.0.1:11434/v1 EXAMPLE_MODEL=qwen3 python examples/openai_compatible.py
    OPENAI_API_KEY=... EXAMPLE_MODEL=gpt-5.6 python examples/openai_compatible.py

Without one of these it says so and ends. The key is named, never given as text: only its name could ever be stored.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import perdure as p
from perdure.providers.openai import ChatModel


@p.tool(effect="observe")
async def weather(city: str) -> str:
    """Weather of a city right now.

    Args:
        city: name of the city.
    """
    return f"{city}: sunny, 21 °C"


def model() -> ChatModel:
    url, key = os.environ.get("EXAMPLE_BASE_URL"), p.Secret.env("OPENAI_API_KEY")
    if url is None and "OPENAI_API_KEY" not in os.environ:
        print("skipped: set EXAMPLE_BASE_URL or OPENAI_API_KEY to run this with a real model")
        sys.exit(0)
    return ChatModel(
        os.environ.get("EXAMPLE_MODEL", "gpt-5.6"),
        base_url=url,
        api_key=key if "OPENAI_API_KEY" in os.environ else None,
    )


async def main() -> None:
    agent = p.Agent("forecaster", instructions="Answer in one sentence.", tools=[weather], model=model())
    with tempfile.TemporaryDirectory() as folder:
        async with p.open(Path(folder) / "weather.db", agents=[agent]) as app:
            receipt = await app.submit(agent, "What is the weather in Oslo?")
            print("answer:", await app.output(receipt))
            run = await app.inspect(receipt)
            print("turns:", len(run.turns), "by", run.turns[-1].model)


if __name__ == "__main__":
    asyncio.run(main())
