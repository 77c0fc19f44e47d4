"""What every model behind HTTP has in common, without any provider library: name, address, key, settings, profile.

The libraries are loaded by the first call, in a thread, because it takes seconds.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from perdure.definitions.context import Secret
from perdure.errors import Invalid
from perdure.ports.provider import Capability, Delta, ModelError, Profile, Request, Response
from perdure.providers import pricing
from perdure.providers._target import Target
from perdure.providers.setup import Setup
from perdure.rules.accounting import Price, Rate

if TYPE_CHECKING:
    from perdure.providers._pydantic_ai import Connection

__all__ = ["RemoteModel", "Target", "check_address", "load", "not_installed"]

_loaded: dict[str, ModuleType] = {}


class RemoteModel:
    """A model behind HTTP. A subclass names its format and libraries, and makes the target.

    One call is one HTTP request: the client libraries' own retries are off, whether to repeat is the engine's decision.
    Works in several event loops at once; each has its own connections, closed when the loop shuts down.
    """

    format_module: ClassVar[str]  # holds `formats`: by the target's api, what makes a Format of a target and a client
    libraries: ClassVar[tuple[str, ...]] = ("httpx2", "pydantic_ai")
    prefix: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    prices_as: ClassVar[str] = ""  # the provider in price tables, where it differs from the prefix
    address_variable: ClassVar[str] = ""  # of the environment, read by the client library where no base_url is given
    address_default: ClassVar[str] = ""

    def __init__(
        self,
        target: Target,
        api_key: Secret | None,
        settings: Mapping[str, Any] | None,
        price: Price | None,
        rate: Rate | None,
        capabilities: frozenset[Capability] | None,
    ) -> None:
        if target.base_url is not None:
            check_address(target.name, target.base_url)
        if api_key is not None and not isinstance(api_key, Secret):
            raise Invalid(
                f"The api_key of model `{target.name}` is not a Secret.",
                help='Name its environment variable: Secret.env("NAME").',
            )
        for what, value, kind in (("price", price, Price), ("rate", rate, Rate)):
            if value is not None and not isinstance(value, kind):
                raise Invalid(
                    f"The {what} of model `{target.name}` is a {type(value).__name__}.",
                    help=f"Use {kind.__name__}(...).",
                )
        self._target = target
        self._api_key = api_key
        self._settings = dict(settings or {})
        self._price = price
        self._rate = rate
        self._capabilities = capabilities
        self._profile: Profile | None = None

    def __repr__(self) -> str:
        base_url = self._target.base_url
        host = f", host={urlsplit(base_url).hostname!r}" if base_url else ""
        return f"{type(self).__name__}({self._target.model!r}{host})"

    @property
    def name(self) -> str:
        """The prefix of the wire format and the name of the model."""
        return self._target.name

    @property
    def profile(self) -> Profile:
        """What the model can do and costs; the price is looked up when this is first asked for."""
        if self._profile is None:
            most = self._settings.get("max_tokens")
            self._profile = Profile(
                capabilities=self._capabilities,
                price=self._price or self._known_price(),
                max_output_tokens=most if isinstance(most, int) else None,
                rate=self._rate,
                shared=True,
            )
        return self._profile

    def _known_price(self) -> Price | None:
        provider = self._prices_as()
        names = (self.name, f"{provider}:{self._target.model}") if provider else (self.name,)
        return pricing.price_of(names, provider, self._target.model)

    def _prices_as(self) -> str:
        """The provider whose prices are this model's; empty where somebody else serves it."""
        return self.prices_as or self.prefix

    def setup(self) -> Setup:
        """Where calls go, where the key is, and what they load."""
        address = self._target.base_url or os.environ.get(self.address_variable) or self.address_default
        return Setup(address, self._api_key, self.libraries)

    def require(self) -> None:
        """Check, without loading them, that the provider libraries are installed; and the price file, if there is one.

        Raises:
            Invalid: one is missing, or the file that ``PERDURE_PRICES`` names is wrong.
        """
        pricing.own_file()
        if missing := self.setup().missing():
            raise not_installed(self.name, ", ".join(missing))

    async def respond(self, request: Request, emit: Callable[[Delta], None] | None) -> Response:
        """One HTTP request, one complete response; streamed if ``emit`` is given.

        ``dispatched`` of a failure is what the wire shows: ``no`` until the first byte of the request was written,
        ``yes`` when the provider's own status or an error in the stream answered it, else ``unknown``.

        Raises:
            ModelError: no complete response.
            Invalid: the provider libraries are not installed.
        """
        key = await asyncio.to_thread(self._key) if self._api_key is not None and self._api_key.blocks else self._key()
        connection = await self._connection()
        return await connection.respond(request, emit, key, self._settings)

    def _key(self) -> str | None:
        if self._api_key is None:
            return None
        try:
            key = self._api_key.reveal()
        except Invalid as error:
            raise ModelError(
                f"Model `{self.name}` has no API key.", dispatched="no", kind="model.setup", help=str(error)
            ) from error
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ModelError(
                f"The API key of model `{self.name}` holds characters that no key has.",
                dispatched="no",
                kind="model.setup",
                help=f"Correct what {self._api_key!r} names.",
            )
        return key

    async def _connection(self) -> Connection:
        name = self.format_module
        module = _loaded[name] if name in _loaded else await asyncio.to_thread(load, name, self.name)
        try:
            core = _loaded["_pydantic_ai"]
            connection: Connection = await core.connection(self._target, module.formats[self._target.api])
        except ModelError:
            raise
        except Exception as error:  # an address or a proxy in the environment that no client can use
            raise ModelError(
                f"Model `{self.name}` cannot be set up: {error}", dispatched="no", kind="model.setup"
            ) from error
        return connection


def check_address(name: str, base_url: str) -> None:
    """An http(s) address without credentials.

    Raises:
        Invalid: it is not; the message does not repeat it.
    """
    try:
        address = urlsplit(base_url)
        fits = address.scheme in ("http", "https") and address.hostname and address.username is None
        _ = address.port
    except ValueError:
        fits = False
    if not fits:
        raise Invalid(
            f"The base_url of model `{name}` is not an http(s) address without credentials.",
            help='Give the address up to the version, for example "http://127.0.0.1:11434/v1".',
        )


def load(module: str, name: str) -> ModuleType:
    """A module of this package that knows a provider library. Takes seconds the first time: call it in a thread.

    Raises:
        Invalid: the library is not installed.
    """
    try:
        for part in ("_pydantic_ai", module):
            if part not in _loaded:  # sys.modules would also show it half loaded
                _loaded[part] = importlib.import_module(f"perdure.providers.{part}")
    except ImportError as error:
        raise not_installed(name, error.name or "a library") from error
    return _loaded[module]


def not_installed(name: str, what: str) -> Invalid:
    """What to do about a missing library."""
    return Invalid(f"Model `{name}` needs {what}:", help='pip install "perdure[models]"')
