"""Calls of a model object of pydantic-ai. Loaded by its first call, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic_ai import messages as their
from pydantic_ai.models import Model
from pydantic_ai.settings import ModelSettings

from perdure.ports.provider import Delta, Finish, ModelError, Request, Response
from perdure.providers import _failures as failures
from perdure.providers._pydantic_ai import Format, ask, response_of, settings_for


class LibraryFormat(Format):
    """Whatever the wrapped model speaks: parts go back by the names its library gave them."""

    settings_known: ClassVar[frozenset[str]] = ModelSettings.__required_keys__ | ModelSettings.__optional_keys__
    effort_setting: ClassVar[str] = "thinking"
    details_kept: ClassVar[frozenset[str]] = frozenset(
        {"extra_content", "phase", "namespace", "raw_content", "thought_signature"}
    )

    def __init__(self, model: Model[Any], *, native: bool) -> None:
        self.model = model
        self.system = model.system
        self.native = native

    def knows(self, setting: str) -> bool:
        """A common setting, or one of a provider's own, which have its name before them."""
        return super().knows(setting) or "_" in setting

    def settings(self, given: dict[str, Any], request: Request) -> dict[str, Any]:
        return given | ({"thinking": False} if given.get("thinking") == "none" else {})

    def finish(self, answer: their.ModelResponse, calls: bool) -> Finish:
        """Why the model stopped; models for tests do not say."""
        if answer.finish_reason is None:
            return "tool_calls" if calls else "stop"
        return super().finish(answer, calls)


async def respond(
    model: Model[Any],
    request: Request,
    emit: Callable[[Delta], None] | None,
    *,
    name: str,
    native: bool,
    defaults: Mapping[str, Any],
) -> Response:
    """See ``LibraryModel.respond``."""
    form = LibraryFormat(model, native=native)
    try:
        settings = settings_for(form, defaults, request, name) | {"max_retries": 0}
        async with asyncio.timeout(request.timeout):
            answer = await ask(form, request, settings, emit, name)
        return response_of(form, request, answer, name)
    except ModelError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 (whatever the model raises, the caller learns what is known)
        failure = failures.of_library(error, name, request.timeout)
    # Outside the handler: the cause may show a key in a header or an echoed body, so it goes no further.
    raise failure
