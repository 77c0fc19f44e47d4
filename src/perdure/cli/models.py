"""Models: which names there are, and whether one can be used from here. Nothing is sent without ``--live`` and a yes."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, get_args

import click

from perdure.cli import failures
from perdure.cli.opening import run
from perdure.cli.output import Output, plain
from perdure.definitions.context import Secret
from perdure.errors import Invalid
from perdure.ports.provider import Capability, Model, Profile, Request, UserMessage, profile_of
from perdure.providers.resolve import named, prefixes
from perdure.providers.setup import Setup, setup_of
from perdure.records.parts import TextPart
from perdure.rules import accounting

LIVE_SECONDS_MAX = 60.0
LIVE_TOKENS_MAX = 64
ASKED = "Reply with the one word: ready"
_INSTALL = 'pip install "perdure[models]"'


@click.group(invoke_without_command=True)
@click.pass_context
def models(context: click.Context) -> object:
    """List the names models have, check whether one can be used. Without a command: list."""
    return context.invoke(list_) if context.invoked_subcommand is None else None


@models.command("list")
def list_() -> int:
    """List what the name of a model may begin with, and what such a model needs."""

    async def work(out: Output) -> None:
        items = [_prefix_item(prefix) for prefix in prefixes()]
        columns = {"name": "id", "adapter": "adapter", "key": "key", "host": "host"}
        out.listing("Model", items, columns, empty="No models.")

    return run(work)


@models.command()
@click.argument("name", metavar="NAME")
@click.option("--live", is_flag=True, help="Also make one tiny call, which may cost money, after a yes.")
@click.option("--yes", is_flag=True, help="With --live: yes.")
def check(name: str, live: bool, yes: bool) -> int:
    """Tell what the model NAME can do and costs, and whether its key and libraries are here. Sends nothing by itself.

    NAME is as an agent writes it, for example openai:gpt-5.6. The key itself is never shown. Exit code 0 if the model
    can be used, 2 if there is no such name, 3 if its key or a library is missing. With --live one call is made: 6 if it
    fails.
    """

    async def work(out: Output) -> int:
        model = named(name)
        found = setup_of(model)
        why_no_key = await _why_no_key(found.key)
        item = _item(model, found, why_no_key)
        problems = _problems(found, why_no_key)
        if problems or not live:
            error = None
            if problems:
                message = f"Model `{model.name}` cannot be used from here: {'; '.join(problems)}."
                error = failures.error_body("setup", message, failures.HELD, help=_help(found))
            _tell(out, item, error)
            return failures.HELD if problems else 0
        _agree(model, found, yes)
        item["live"] = await _call(model, profile_of(model))
        _tell(out, item, None)
        return 0

    return run(work)


# -- what is told ------------------------------------------------------------------------------------------------------


def _prefix_item(prefix: str) -> dict[str, Any]:
    try:
        model = named(f"{prefix}:NAME")
        found = setup_of(model)
    except Invalid as error:  # such a model needs more than a name
        return {"id": f"{prefix}:NAME", "adapter": None, "key": None, "host": error.message}
    return {
        "id": f"{prefix}:NAME",
        "adapter": type(model).__name__,
        "key": _place(found.key),
        "host": found.host or None,
    }


def _item(model: Model, found: Setup, why_no_key: str | None) -> dict[str, Any]:
    profile = profile_of(model)
    able = profile.capabilities
    missing = found.missing()
    return {
        "id": model.name,
        "adapter": type(model).__name__,
        "capabilities": None if able is None else {one: one in able for one in get_args(Capability)},
        "price": plain(profile.price),
        "maxOutputTokens": profile.max_output_tokens,
        "rate": plain(profile.rate),
        "host": found.host or None,
        "key": None if found.key is None else {"place": _place(found.key), "present": why_no_key is None},
        "libraries": [{"name": one, "installed": one not in missing} for one in found.libraries],
        "live": None,
    }


def _place(key: Secret | None) -> str | None:
    return None if key is None else repr(key).removeprefix("Secret(").removesuffix(")")


async def _why_no_key(key: Secret | None) -> str | None:
    if key is None:
        return None
    try:
        await asyncio.to_thread(key.reveal)
    except Invalid as error:
        return error.message
    return None


def _problems(found: Setup, why_no_key: str | None) -> list[str]:
    missing = [f"{', '.join(found.missing())} is not installed"] if found.missing() else []
    return [*([why_no_key.rstrip(".")] if why_no_key else []), *missing]


def _help(found: Setup) -> str:
    return f"Install the libraries: {_INSTALL}." if found.missing() else "Set the key where this process is started."


def _tell(out: Output, item: dict[str, Any], error: dict[str, Any] | None) -> None:
    out.final("ModelCheck", item, error=error)
    if not out.human:
        return
    key = item["key"]
    libraries = item["libraries"]
    out.fields(
        {
            "model": item["id"],
            "adapter": item["adapter"],
            "host": item["host"],
            "key": f"{key['place']}, {'present' if key['present'] else 'missing'}" if key else "none needed",
            "libraries": ", ".join(f"{one['name']}{'' if one['installed'] else ' (missing)'}" for one in libraries),
            "price": _price_line(item["price"]),
            "output at most": f"{item['maxOutputTokens']:,} tokens" if item["maxOutputTokens"] else "not declared",
            "rate": item["rate"],
        }
    )
    out.line()
    if item["capabilities"] is None:
        out.line("What it can do is not declared, so nothing is refused on that ground.")
    else:
        rows = [{"capability": name.replace("_", " "), "has": has} for name, has in item["capabilities"].items()]
        out.table({"capability": "capability", "has": "has"}, rows)
    if item["live"] is not None:
        out.line()
        _tell_live(out, item["live"])
    if error is not None:
        out.note(f"{error['message']} {error['help']}")


def _price_line(price: dict[str, Any] | None) -> str:
    if price is None:
        return "not known: a cost budget cannot be kept"
    told = [f"{kind} ${price[field] / 1e6:,.3f}" for kind, field in _PRICED.items() if price[field] is not None]
    return f"{', '.join(told)} for a million tokens; table {price['version']}"


_PRICED = {
    "input": "input", "output": "output", "cache read": "cacheRead", "cache write": "cacheWrite",
    "reasoning": "reasoning",
}  # fmt: skip


def _tell_live(out: Output, live: dict[str, Any]) -> None:
    cost = live["costMicroUsd"]
    out.fields(
        {
            "answered in": f"{live['latencyMilliseconds']:,} ms",
            "answer": live["text"] or f"({live['finish']})",
            "tokens": f"{live['inputTokens']:,} in, {live['outputTokens']:,} out",
            "cost": "not known" if cost is None else f"${cost / 1e6:.6f}",
            "request id": live["requestId"] or None,
        }
    )


# -- the call ----------------------------------------------------------------------------------------------------------


def _agree(model: Model, found: Setup, yes: bool) -> None:
    """An explicit yes, by ``--yes`` or on a terminal.

    Raises:
        Invalid: there is none, and nobody to ask.
        click.Abort: the answer was no.
    """
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty():
        raise Invalid("--live calls the provider, which may cost money.", help="Say --yes as well.")
    where = f" at {found.host}" if found.host else ""
    if not click.confirm(f"Send one call to {model.name}{where}? It may cost money", err=True):
        raise click.Abort


async def _call(model: Model, profile: Profile) -> dict[str, Any]:
    request = Request(
        agent="models-check",
        run="models-check",
        turn=1,
        messages=[UserMessage(ASKED)],
        timeout=LIVE_SECONDS_MAX,
        settings={"max_tokens": LIVE_TOKENS_MAX},
    )
    began = time.perf_counter()
    response = await model.respond(request, None)
    elapsed = time.perf_counter() - began
    usage = response.usage
    return {
        "latencyMilliseconds": round(elapsed * 1000),
        "text": "".join(part.text for part in response.parts if isinstance(part, TextPart))[:200],
        "finish": response.finish,
        "inputTokens": usage.input,
        "outputTokens": usage.output,
        "costMicroUsd": None if profile.price is None else accounting.cost(usage, profile.price),
        "requestId": response.evidence.request_id,
    }
