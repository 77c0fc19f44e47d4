"""Models deployed at Azure OpenAI. Importing this module loads no provider library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from perdure.definitions.context import Secret
from perdure.errors import Invalid
from perdure.providers._remote import RemoteModel, Target, check_address
from perdure.providers.openai import Continuation, Output, chat_options, check_name, responses_options
from perdure.rules.accounting import Price, Rate

__all__ = ["AzureModel"]

ENDPOINT_VARIABLE = "AZURE_OPENAI_ENDPOINT"
VERSION_VARIABLE = "OPENAI_API_VERSION"
_AZURE_OPENAI_API_KEY = Secret.env("AZURE_OPENAI_API_KEY")


class AzureModel(RemoteModel):
    """A model deployed at Azure OpenAI, by Chat Completions or Responses.

    One call is one HTTP request. The key goes in the header ``api-key``.

    Args:
        deployment: the name of the deployment.
        endpoint: the resource, for example ``"https://NAME.openai.azure.com"``; by default the environment variable
            ``AZURE_OPENAI_ENDPOINT``.
        api_version: for example ``"2026-10-01-preview"``; by default the environment variable ``OPENAI_API_VERSION``;
            without either, the resource's version-less ``/openai/v1`` is called, as it is where the endpoint ends in
            ``/v1``.
        api_key: where the key comes from; read at each call and never stored or shown.
        settings: default settings, as with ``ChatModel`` and ``ResponsesModel``.
        api: ``"chat"`` or ``"responses"``.
        continuation, encrypted_reasoning: with ``api="responses"``, as with ``ResponsesModel``. A deployment's name does
            not tell whether its model reasons: say ``encrypted_reasoning=True`` where it does.
        output: as with ``ChatModel``; native by default.
        price: what tokens cost; by default Azure's price of a model named like the deployment, else unknown.
        rate: how often it may be called by all processes on one database together; None for no bound of ours.

    Raises:
        Invalid: no endpoint, or one that is no http(s) address or holds a password; a blank name; a version beside
            ``/v1``; a key given as text; an unknown ``api``, ``continuation`` or ``output``.
    """

    format_module = "_openai"
    libraries = ("httpx2", "openai", "pydantic_ai")
    prefix = "azure"
    address_variable = ENDPOINT_VARIABLE

    def __init__(
        self,
        deployment: str,
        endpoint: str | None = None,
        api_version: str | None = None,
        api_key: Secret = _AZURE_OPENAI_API_KEY,
        settings: Mapping[str, Any] | None = None,
        *,
        api: Literal["chat", "responses"] = "chat",
        continuation: Continuation = "stateless",
        encrypted_reasoning: bool | None = None,
        output: Output | None = None,
        price: Price | None = None,
        rate: Rate | None = None,
    ) -> None:
        check_name(deployment)
        name = f"azure:{deployment}"
        if endpoint is None and not (endpoint := os.environ.get(ENDPOINT_VARIABLE, "")):
            raise Invalid(
                f"Model `{name}` has no endpoint.", help=f"Give endpoint=..., or set the variable {ENDPOINT_VARIABLE}."
            )
        check_address(name, endpoint)
        address = endpoint.rstrip("/")
        versionless = urlsplit(address).path.endswith("/v1")
        if versionless and api_version is not None:
            raise Invalid(
                f"The endpoint of model `{name}` ends in /v1, where there is no api_version.",
                help="Leave out the one or the other.",
            )
        version = None if versionless else api_version or os.environ.get(VERSION_VARIABLE) or None
        if version is None and not versionless:
            address += "/openai/v1"
        match api:
            case "chat":
                options, able = chat_options(name, output, official=True)
                able -= {"files"}  # its Chat Completions takes images only
            case "responses":
                options, able = responses_options(name, continuation, encrypted_reasoning, output)
            case _:
                raise Invalid(f"The api of model `{name}` is {api!r:.64}.", help='Use "chat" or "responses".')
        options = (*options, ("api_version", version), ("key_header", "api-key"))
        super().__init__(Target(name, deployment, api, address, options), api_key, settings, price, rate, able)
