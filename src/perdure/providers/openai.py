"""Models behind OpenAI's Chat Completions wire format: OpenAI itself and the many servers that speak it.

Importing this module loads no provider library. They are loaded (in a thread: it takes seconds) by the first call, from
``_openai_chat``, which holds everything that knows them.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from perdure.definitions.tool import Secret
from perdure.errors import Invalid
from perdure.ports.provider import Delta, ModelError, Request, Response
from perdure.providers.setup import Setup

if TYPE_CHECKING:
    from perdure.providers._openai_chat import Connection

__all__ = ["ChatModel"]

LIBRARIES = ("httpx2", "openai", "pydantic_ai")
_library: ModuleType | None = None
_OPENAI_API_KEY = Secret.env("OPENAI_API_KEY")


class ChatModel:
    """A model of an OpenAI-compatible Chat Completions server.

    One call is one HTTP request: the client's own retries are off, whether to repeat is the engine's decision. Works
    in several event loops at once; each has its own connections, closed when the loop shuts down.

    Args:
        name: the model as the server knows it, for example ``"gpt-5.6"``.
        base_url: the server, for example ``"http://127.0.0.1:11434/v1"``; by default the environment variable
            ``OPENAI_BASE_URL``, else OpenAI.
        api_key: where the key comes from; read at each call and never stored or shown. None for a server without keys.
        settings: default settings (``temperature``, ``max_tokens``, ...), under those of the request. Names are those
            of pydantic-ai's ``OpenAIChatModelSettings``, without the ones that would retry or bound time.

    Raises:
        Invalid: a blank name, a ``base_url`` that is no http(s) address or holds a password, a key given as text.
    """

    def __init__(
        self,
        name: str,
        base_url: str | None = None,
        api_key: Secret | None = _OPENAI_API_KEY,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if not name.strip():
            raise Invalid("The name of a model is blank.")
        if base_url is not None:
            _check_address(name, base_url)
        if api_key is not None and not isinstance(api_key, Secret):
            raise Invalid(
                f"The api_key of model `openai:{name}` is not a Secret.",
                help='Name its environment variable: Secret.env("OPENAI_API_KEY").',
            )
        self._model = name
        self._base_url = base_url
        self._api_key = api_key
        self._settings = dict(settings or {})

    def __repr__(self) -> str:
        host = f", host={urlsplit(self._base_url).hostname!r}" if self._base_url else ""
        return f"ChatModel({self._model!r}{host})"

    @property
    def name(self) -> str:
        """``openai:`` and the name of the model."""
        return f"openai:{self._model}"

    def setup(self) -> Setup:
        """Where calls go, where the key is, and what they load."""
        address = self._base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        return Setup(address, self._api_key, LIBRARIES)

    def require(self) -> None:
        """Check, without loading them, that the provider libraries are installed.

        Raises:
            Invalid: one is missing.
        """
        missing = [library for library in LIBRARIES if find_spec(library) is None]
        if missing:
            raise _not_installed(self.name, ", ".join(missing))

    async def respond(self, request: Request, emit: Callable[[Delta], None] | None) -> Response:
        """One HTTP request, one complete response; streamed if ``emit`` is given.

        ``dispatched`` of a failure is what the wire shows: ``no`` until the first byte of the request was written,
        ``yes`` when an HTTP status or an error in the stream answered it, else ``unknown``.

        Raises:
            ModelError: no complete response.
            Invalid: the provider libraries are not installed.
        """
        key = self._key()
        connection = await self._connection()
        return await connection.respond(request, emit, key, self._settings)

    def _key(self) -> str | None:
        if self._api_key is None:
            return None
        try:
            key = self._api_key.reveal()
        except Invalid as error:
            raise ModelError(f"Model `{self.name}` has no API key.", dispatched="no", help=str(error)) from error
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ModelError(
                f"The API key of model `{self.name}` holds characters that no key has.",
                dispatched="no",
                help=f"Correct what {self._api_key!r} names.",
            )
        return key

    async def _connection(self) -> Connection:
        library = await asyncio.to_thread(_load, self.name) if _library is None else _library
        try:
            connection: Connection = await library.connection(self._model, self._base_url)
        except Exception as error:  # an address or a proxy in the environment that no client can use
            raise ModelError(f"Model `{self.name}` cannot be set up: {error}", dispatched="no") from error
        return connection


def _check_address(name: str, base_url: str) -> None:
    try:
        address = urlsplit(base_url)
        fits = address.scheme in ("http", "https") and address.hostname and address.username is None
        _ = address.port
    except ValueError:
        fits = False
    if not fits:
        raise Invalid(
            f"The base_url of model `openai:{name}` is not an http(s) address without credentials.",
            help='Give the address up to the version, for example "http://127.0.0.1:11434/v1".',
        )


def _load(name: str) -> ModuleType:
    global _library  # noqa: PLW0603 (loaded once; sys.modules would also show it half loaded)
    try:
        _library = importlib.import_module("perdure.providers._openai_chat")
    except ImportError as error:
        raise _not_installed(name, error.name or "a library") from error
    return _library


def _not_installed(name: str, what: str) -> Invalid:
    return Invalid(f"Model `{name}` needs {what}:", help='pip install "perdure[models]"')
