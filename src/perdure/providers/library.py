"""A model object of pydantic-ai as a model of ours. Importing this module does not load the library."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from perdure.ports.provider import Capability, Delta, Profile, Request, Response
from perdure.providers._remote import load
from perdure.providers.openai import Output, native_of
from perdure.rules.accounting import Price, Rate

if TYPE_CHECKING:
    from pydantic_ai.models import Model

__all__ = ["LibraryModel"]


class LibraryModel:
    """Any model of pydantic-ai: those of its other providers, its ``TestModel`` and ``FunctionModel``, your own.

    An agent that is given such an object gets it wrapped so. What is known about dispatch is less than with our own
    models, because nobody here sees the wire: whatever the object raised that is no answer of the provider is
    ``unknown``, and there is no evidence. Its client may repeat a request by itself; ``max_retries`` 0 is passed on,
    which those of OpenAI, Anthropic and Groq obey. With other clients, turn their retries off.

    Args:
        model: the object. It is used in every event loop in which it is called; some HTTP clients allow only one.
        settings: default settings, under those of the request; names are those of pydantic-ai's settings.
        output: how a structured answer is asked for, ``"native"`` or ``"prompted"``; by default prompted.
        capabilities: what it can do; None: nobody declared it, so nothing is refused on that ground.
        price: what tokens cost; None when unknown.
        rate: how often it may be called by all processes on one database together; None for no bound of ours.

    Raises:
        Invalid: an unknown ``output``.
    """

    def __init__(
        self,
        model: Model[Any],
        settings: Mapping[str, Any] | None = None,
        *,
        output: Output | None = None,
        capabilities: frozenset[Capability] | None = None,
        price: Price | None = None,
        rate: Rate | None = None,
    ) -> None:
        self._model = model
        self._name = f"pydantic-ai:{model.model_id}"
        self._settings = dict(settings or {})
        self._native = native_of(self._name, output, False)
        most = self._settings.get("max_tokens")
        self.profile = Profile(
            capabilities=capabilities,
            price=price,
            max_output_tokens=most if isinstance(most, int) else None,
            rate=rate,
            shared=True,
        )

    def __repr__(self) -> str:
        return f"LibraryModel({type(self._model).__name__}, name={self._name!r})"

    @property
    def name(self) -> str:
        """``pydantic-ai:`` and the library's name of the model, with its provider."""
        return self._name

    async def respond(self, request: Request, emit: Callable[[Delta], None] | None) -> Response:
        """One call of the object, streamed if ``emit`` is given.

        Raises:
            ModelError: no complete response.
        """
        library = await asyncio.to_thread(load, "_library", self._name)
        response: Response = await library.respond(
            self._model, request, emit, name=self._name, native=self._native, defaults=self._settings
        )
        return response
