"""Serve from a shell: prints the port, then serves until interrupted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from perdure.providers.scripted import call, calls, say
from support.fake_models.script import FAULTS, Answer
from support.fake_models.server import FakeModels


def item_of(value: Any) -> Answer:
    """An item from JSON: ``"text"``, ``{"call": "name", "arguments": {}}``, a list of these, ``{"fault": "500"}``."""
    match value:
        case str():
            return say(value)
        case list():
            return calls(*(item_of(one) for one in value))  # type: ignore[arg-type]
        case {"call": str(name)}:
            return call(name, value.get("arguments", {}), id=value.get("id", ""))
        case {"fault": str(name)}:
            return FAULTS[name]
        case _:
            return say(value)


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(prog="python -m support.fake_models", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--key")
    parser.add_argument("--script", type=Path, help="a JSON list with one item a turn")
    options = parser.parse_args()
    server = FakeModels(options.port, options.journal, options.key)
    if options.script is not None:
        server.script([item_of(value) for value in json.loads(options.script.read_text())])
    print(server.port, flush=True)
    server.serve()


if __name__ == "__main__":
    main()
