"""A file in an agent's input: a value like any other, that crosses JSON as an object of a reserved shape.

``{"$file": "v1", "media_type": "image/png", "name": "a.png", "data": "<base64>"}``, or ``url`` in place of ``data``.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from perdure.errors import Invalid
from perdure.limits import FILE_NAME_CHARS_MAX, FILE_URL_CHARS_MAX, PAYLOAD_BYTES_MAX

KEY = "$file"  # an input may hold it only as the mark of a file
_MEDIA_TYPE = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,62}/[a-z0-9][a-z0-9!#$&^_.+-]{0,126}")
_MEDIA_TYPES = {  # fixed, so that every machine says the same of a name
    "aac": "audio/aac", "avif": "image/avif", "bmp": "image/bmp", "csv": "text/csv",
    "docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    "flac": "audio/flac", "gif": "image/gif", "heic": "image/heic", "htm": "text/html", "html": "text/html",
    "jpeg": "image/jpeg", "jpg": "image/jpeg", "json": "application/json", "m4a": "audio/mp4", "md": "text/markdown",
    "mov": "video/quicktime", "mp3": "audio/mpeg", "mp4": "video/mp4", "mpeg": "video/mpeg", "ogg": "audio/ogg",
    "pdf": "application/pdf", "png": "image/png",
    "pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
    "svg": "image/svg+xml", "tif": "image/tiff", "tiff": "image/tiff", "txt": "text/plain", "wav": "audio/wav",
    "webm": "video/webm", "webp": "image/webp",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    "xml": "application/xml", "yaml": "application/yaml", "yml": "application/yaml",
}  # fmt: skip


class Misfit(Invalid, ValueError):
    """What a file cannot be; a ``ValueError`` as well, so that a decoder adds where it stands."""


class File(
    msgspec.Struct, frozen=True, kw_only=True, tag_field=KEY, tag="v1", omit_defaults=True, forbid_unknown_fields=True
):
    """An image, a document, a sound or a film in an agent's input, or where to fetch it.

    It may be the input itself or stand anywhere in its type. The model gets the content beside the text of the input,
    where a short mention stands in its place. One input holds at most 64 files, and with the content of all of them, as
    base64, it is at most 1 MiB; larger ones are given by their address.

    Attributes:
        media_type: for example ``"image/png"``.
        data: the content; empty when ``url`` is given.
        name: file name that the model may see; may be empty.
        url: http(s) address from which the provider fetches it; empty when ``data`` is given.

    Raises:
        Invalid: not exactly one of ``data`` and ``url``, or one of them cannot be.
    """

    media_type: str
    data: bytes = b""
    name: str = ""
    url: str = ""

    def __post_init__(self) -> None:
        media_type, data, name, url = self._given()
        if not isinstance(media_type, str) or not _MEDIA_TYPE.fullmatch(media_type):
            raise Misfit(
                f"The media type of a file is {media_type!r:.80}.",
                help='Give one in lower case without parameters, for example "image/png".',
            )
        if not isinstance(data, bytes) or not isinstance(url, str) or bool(data) == bool(url):
            raise Misfit("A file has either `data`, bytes that are not empty, or `url`.")
        if url:
            _check_url(url)
        if not isinstance(name, str) or len(name) > FILE_NAME_CHARS_MAX or not name.isprintable():
            raise Misfit(f"The name of a file is not printable text of at most {FILE_NAME_CHARS_MAX} characters.")

    def _given(self) -> tuple[Any, Any, Any, Any]:
        return self.media_type, self.data, self.name, self.url

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, media_type: str = "") -> File:
        """The file at ``path`` as it is now, with its name. Blocks while it is read.

        Args:
            media_type: what it is; by default the extension of ``path`` says so.

        Raises:
            Invalid: it cannot be read, is empty or over 1 MiB, or its extension is not known.
        """
        place = Path(path)
        found = media_type or _MEDIA_TYPES.get(place.suffix.lower().removeprefix("."), "")
        if not found:
            raise Invalid(
                f"The media type of the file {str(place)!r} does not follow from its extension.",
                help='Say it: File.read(path, media_type="...").',
            )
        try:
            with place.open("rb") as opened:
                data = opened.read(PAYLOAD_BYTES_MAX + 1)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise Invalid(f"The file {str(place)!r} cannot be read: {why}.") from error
        if not data:
            raise Invalid(f"The file {str(place)!r} is empty.")
        if len(data) > PAYLOAD_BYTES_MAX:
            raise Invalid(
                f"The file {str(place)!r} is over the limit of {PAYLOAD_BYTES_MAX:,} bytes (PAYLOAD_BYTES_MAX).",
                help="Put it where the provider can fetch it, and give its address: File.at(url, media_type=...).",
            )
        return cls(media_type=found, data=data, name=place.name)

    @classmethod
    def at(cls, url: str, *, media_type: str, name: str = "") -> File:
        """The file at an http(s) address. Perdure records and passes on the address; the provider fetches it.

        Raises:
            Invalid: no http(s) address, one with a password, or one of over 8,192 characters.
        """
        return cls(media_type=media_type, url=url, name=name)

    def __repr__(self) -> str:
        content = f"{len(self.data):,} bytes" if self.data else "at an address"
        return f"File({self.media_type}, {content}{f', {self.name!r}' if self.name else ''})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        core_schema = import_module("pydantic_core.core_schema")  # whoever calls this has it
        return core_schema.no_info_plain_validator_function(
            _from_pydantic,
            serialization=core_schema.plain_serializer_function_ser_schema(msgspec.to_builtins, when_used="json"),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        _, found = msgspec.json.schema_components([cls])
        schema: dict[str, Any] = found[cls.__name__]
        return schema


def _from_pydantic(value: Any) -> File:
    if isinstance(value, File):
        return value
    try:
        return msgspec.convert(value, File)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace(" - at `$.", " in `")) from error  # whose path Pydantic knows


def _check_url(url: str) -> None:
    try:
        address = urlsplit(url)
        fits = address.scheme in ("http", "https") and bool(address.hostname) and address.username is None
        _ = address.port
    except ValueError:
        fits = False
    if not fits or len(url) > FILE_URL_CHARS_MAX or not url.isprintable() or " " in url:
        raise Misfit(
            "The address of a file is not an http(s) address without a password, "
            f"of at most {FILE_URL_CHARS_MAX:,} characters."
        )
