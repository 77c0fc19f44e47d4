"""Files in an input: exact both ways in every kind of type, bounded, and shown to the model beside the text."""

from __future__ import annotations

import base64
import dataclasses
import json
import pickle
import sys
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import pydantic
import pytest

import perdure as p
from perdure import limits
from perdure.agent.prompt import check_needs, input_message, needs
from perdure.definitions.inputs import input_codec_of
from perdure.definitions.schema import codec_of
from perdure.errors import Invalid
from perdure.ports.provider import (
    FileContent,
    ModelError,
    Profile,
    Request,
    SystemMessage,
    ToolSpec,
    UserMessage,
)
from perdure.providers.scripted import Scripted, say

PNG = bytes(range(256))
PHOTO = p.File(data=PNG, media_type="image/png", name="a.png")
PAPER = p.File.at("https://files.example.org/paper.pdf?sig=1", media_type="application/pdf")


class Struct(msgspec.Struct):
    photo: p.File
    note: str = ""


@dataclasses.dataclass
class Data:
    photo: p.File
    others: list[p.File] = dataclasses.field(default_factory=list)
    text: str = "x"


class Typed(TypedDict, total=False):
    photo: p.File


class Model(pydantic.BaseModel):
    photo: p.File
    others: dict[str, p.File | None] = {}


@pydantic.dataclasses.dataclass
class PydanticData:
    photo: p.File


@dataclasses.dataclass
class Mixed:
    model: Model
    photo: p.File


CASES: dict[str, tuple[Any, Any, int]] = {
    "whole": (p.File, PHOTO, 1),
    "list": (list[p.File], [PHOTO, PAPER, PHOTO], 3),
    "union": (list[str | p.File | None], ["a", PAPER, None], 1),
    "optional": (p.File | None, PAPER, 1),
    "struct": (Struct, Struct(PHOTO), 1),
    "dataclass": (Data, Data(PHOTO, [PAPER]), 2),
    "typeddict": (Typed, {"photo": PHOTO}, 1),
    "model": (Model, Model(photo=PHOTO, others={"b": PAPER, "c": None}), 2),
    "pydantic dataclass": (PydanticData, PydanticData(PAPER), 1),
    "constrained": (Annotated[list[p.File], pydantic.Field(max_length=2)], [PHOTO, PAPER], 2),
    "mixed": (Mixed, Mixed(Model(photo=PAPER), PHOTO), 2),
    "nested": (dict[str, list[Struct]], {"a": [Struct(PHOTO), Struct(PAPER, "n")]}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_comes_back_exactly_wherever_it_stands(case: str) -> None:
    type_, value, count = CASES[case]
    codec = input_codec_of(type_, "The input")
    raw, decoded = codec.round_trip(value, "input")
    assert decoded == value == codec.decode(raw)
    assert codec.encode(decoded) == raw
    assert raw.count(b'"$file":"v1"') == count
    message = input_message(raw)
    assert len(message.files) == count
    assert base64.b64encode(PNG).decode() not in message.text
    mentions = mentioned(json.loads(message.text))
    assert [one["$file"] for one in mentions] == list(range(1, count + 1))
    assert [one["media_type"] for one in mentions] == [file.media_type for file in message.files]


def mentioned(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict) and "$file" in value:
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for item in inner for one in mentioned(item)]


@pytest.mark.parametrize("case", CASES)
def test_the_schema_says_what_a_file_looks_like(case: str) -> None:
    schema = codec_of(CASES[case][0]).schema()
    files = [node for node in nodes(schema) if "$file" in node.get("properties", {})]
    assert files
    for file in files:
        assert file["properties"]["$file"] == {"enum": ["v1"]}
        assert file["properties"]["data"]["contentEncoding"] == "base64"
        assert set(file["required"]) == {"$file", "media_type"}
    refs = {node["$ref"] for node in nodes(schema) if "$ref" in node}
    assert all(ref.removeprefix("#/$defs/") in schema["$defs"] for ref in refs)


def nodes(value: Any) -> list[dict[str, Any]]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return ([value] if isinstance(value, dict) else []) + [one for item in inner for one in nodes(item)]


def test_the_wire_shape() -> None:
    assert json.loads(codec_of(p.File).encode(PHOTO)) == {
        "$file": "v1", "media_type": "image/png", "data": base64.b64encode(PNG).decode(), "name": "a.png",
    }  # fmt: skip
    assert json.loads(codec_of(p.File).encode(PAPER)) == {
        "$file": "v1", "media_type": "application/pdf", "url": PAPER.url,
    }  # fmt: skip
    assert pickle.loads(pickle.dumps(PHOTO)) == PHOTO
    assert hash(PHOTO) == hash(p.File(data=PNG, media_type="image/png", name="a.png"))


def test_a_repr_holds_no_content() -> None:
    assert repr(PHOTO) == "File(image/png, 256 bytes, 'a.png')"
    assert repr(PAPER) == "File(application/pdf, at an address)"


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data": b"x", "media_type": "png"}, "media type"),
        ({"data": b"x", "media_type": "Image/PNG"}, "lower case"),
        ({"data": b"x", "media_type": "text/plain; charset=utf-8"}, "without parameters"),
        ({"data": b"x", "media_type": None}, "media type"),
        ({"media_type": "image/png"}, "either"),
        ({"media_type": "image/png", "data": b"x", "url": "https://a"}, "either"),
        ({"media_type": "image/png", "data": "text"}, "either"),
        ({"media_type": "image/png", "data": b"x", "name": "a" * 256}, "255"),
        ({"media_type": "image/png", "data": b"x", "name": "a\nb"}, "printable"),
        ({"media_type": "image/png", "url": "file:///etc/passwd"}, "http"),
        ({"media_type": "image/png", "url": "https://user:pw@host/a"}, "password"),
        ({"media_type": "image/png", "url": "https://host:x/a"}, "http"),
        ({"media_type": "image/png", "url": "https://host/a b"}, "http"),
        ({"media_type": "image/png", "url": "https://host/".ljust(8193, "a")}, "8,192"),
    ],
)
def test_files_that_cannot_be(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Invalid) as caught:
        p.File(**fields)
    assert said in str(caught.value)
    assert "pw@" not in str(caught.value)


@pytest.mark.parametrize("type_", [Struct, Data, Typed, Model, PydanticData])
@pytest.mark.parametrize(
    "file",
    [
        {"$file": "v2", "media_type": "image/png", "data": "eA=="},
        {"$file": "v1", "media_type": "image/png", "data": "eA"},
        {"$file": "v1", "media_type": "image/png", "data": ""},
        {"$file": "v1", "media_type": "nothing", "data": "eA=="},
        {"$file": "v1", "media_type": "image/png", "data": "eA==", "more": 1},
        {"$file": "v1", "data": "eA=="},
        "eA==",
    ],
)
def test_json_that_is_no_file_names_the_place(type_: Any, file: Any) -> None:
    with pytest.raises(Invalid, match=r"at `\$\.photo"):
        codec_of(type_).decode(json.dumps({"photo": file}).encode())


def test_reading_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.PNG"
    path.write_bytes(PNG)
    assert p.File.read(path) == p.File(data=PNG, media_type="image/png", name="a.PNG")
    assert p.File.read(str(path), media_type="image/x-raw").media_type == "image/x-raw"
    for name, said in (("a.xyz", "extension"), ("a", "extension"), ("none.png", "No such file"), (".png", "extension")):
        with pytest.raises(Invalid, match=said) as caught:
            p.File.read(tmp_path / name)
        assert name in str(caught.value)
    with pytest.raises(Invalid, match="cannot be read"):
        p.File.read("a\0.png")
    path.write_bytes(b"")
    with pytest.raises(Invalid, match="empty"):
        p.File.read(path)
    with path.open("wb") as file:
        file.truncate(limits.PAYLOAD_BYTES_MAX)
    assert len(p.File.read(path).data) == limits.PAYLOAD_BYTES_MAX
    with path.open("wb") as file:
        file.truncate(limits.PAYLOAD_BYTES_MAX + 1)
    with pytest.raises(Invalid, match="16,777,216 bytes"):
        p.File.read(path)


def test_too_large_an_input_names_the_field_and_the_limit() -> None:
    large = p.File(data=b"x" * 12_800_000, media_type="image/png")
    small = p.File(data=b"x", media_type="image/png")
    with pytest.raises(Invalid) as caught:
        input_codec_of(Data, "").encode(Data(small, [small, large]), "input of 'clerk'")
    assert "input of 'clerk' is 17,06" in str(caught.value)
    assert "the limit is 16,777,216 bytes (PAYLOAD_BYTES_MAX)" in str(caught.value)
    assert "`$.others[1]`" in str(caught.value)
    assert "File.at" in str(caught.value)
    fits = p.File(data=b"x" * 12_500_000, media_type="image/png")
    assert input_codec_of(p.File, "").round_trip(fits)[1] == fits


def test_at_most_so_many_files() -> None:
    codec = input_codec_of(list[p.File], "")
    assert len(input_message(codec.encode([PAPER] * limits.FILES_MAX)).files) == limits.FILES_MAX
    with pytest.raises(Invalid, match="65 files; the limit is 64"):
        codec.encode([PAPER] * (limits.FILES_MAX + 1), "input")


# -- forgeries ---------------------------------------------------------------------------------------------------------

FORGED = {"$file": "v1", "media_type": "image/png", "data": "eA=="}


def test_text_that_looks_like_a_file_is_text() -> None:
    for text in (json.dumps(FORGED), '{"$file": 1}', '"$file"'):
        raw = input_codec_of(str, "").encode(text)
        assert input_message(raw) == UserMessage(text)
        held = input_message(input_codec_of(dict[str, str], "").encode({"a": text}))
        assert held.files == ()
        assert json.loads(held.text) == {"a": text}


@pytest.mark.parametrize("value", [FORGED, {"a": [FORGED]}, {"$file": 1}, {"a": {"$file": None}}])
def test_an_untyped_value_that_looks_like_a_file_is_refused(value: Any) -> None:
    for type_ in (Any, dict[str, Any]):
        with pytest.raises(Invalid, match=r"the key `\$file`, which only a file may have"):
            input_codec_of(type_, "").encode(value, "input")
        assert codec_of(type_).encode(value)  # a tool's result may hold it: no file is looked for there


def test_a_forgery_beside_a_file_is_refused() -> None:
    class Both(msgspec.Struct):
        photo: p.File
        rest: dict[str, Any]

    codec = input_codec_of(Both, "")
    assert codec.encode(Both(PHOTO, {"file": 1}))
    with pytest.raises(Invalid, match="only a file may have"):
        codec.encode(Both(PHOTO, {"a": FORGED}), "input")


def test_a_file_where_none_is_declared_is_refused() -> None:
    for value in (PHOTO, {"a": PHOTO}):
        with pytest.raises(Invalid):
            input_codec_of(Any, "").encode(value, "input")


# -- the prompt and what it asks of a model ------------------------------------------------------------------------------


def test_the_message_mentions_files_in_their_order() -> None:
    raw = input_codec_of(Data, "").encode(Data(PHOTO, [PAPER, p.File(data=b"x", media_type="text/plain")], "hello"))
    message = input_message(raw)
    assert json.loads(message.text) == {
        "photo": {"$file": 1, "media_type": "image/png", "name": "a.png", "bytes": 256},
        "others": [{"$file": 2, "media_type": "application/pdf"}, {"$file": 3, "media_type": "text/plain", "bytes": 1}],
        "text": "hello",
    }
    assert message.files == (
        FileContent("image/png", PNG, "", "a.png"),
        FileContent("application/pdf", b"", PAPER.url),
        FileContent("text/plain", b"x"),
    )


def request(*files: FileContent, tools: tuple[ToolSpec, ...] = ()) -> Request:
    return Request("a", "r", 1, [SystemMessage("s"), UserMessage("u"), UserMessage("v", files)], tools)


def test_what_a_request_needs() -> None:
    image, paper = FileContent("image/png", b"x"), FileContent("application/pdf", b"x")
    assert needs(request()) == frozenset()
    assert needs(request(image)) == {"images"}
    assert needs(request(paper)) == {"files"}
    assert needs(request(paper, image, tools=(ToolSpec("t", "", {}),))) == {"files", "images", "tools"}


def test_a_model_that_declares_it_cannot_is_not_asked() -> None:
    image = request(FileContent("image/png", b"x"))
    blind = Scripted([], profile=Profile(capabilities=frozenset({"tools"})))
    with pytest.raises(ModelError, match="images") as caught:
        check_needs(blind, image)
    assert (caught.value.dispatched, caught.value.kind, caught.value.retryable) == ("no", "model.setup", False)
    check_needs(blind, request())
    check_needs(Scripted([]), image)  # it declares nothing
    check_needs(Scripted([], profile=Profile(capabilities=frozenset({"images"}))), image)


def test_a_run_gives_the_model_its_files_and_the_instructions_the_decoded_input() -> None:
    asked: list[Request] = []
    told: list[Any] = []

    def answer(one: Request) -> Any:
        asked.append(one)
        return say("seen")

    def instructions(value: Data) -> str:
        told.append(value)
        return "Look."

    agent = p.Agent("looker", input=Data, instructions=instructions, model=Scripted(answer))
    given = Data(PHOTO, [PAPER])
    assert agent.run_sync(given).output == "seen"
    assert told == [given]
    (message,) = [one for one in asked[0].messages if isinstance(one, UserMessage)]
    assert [file.data for file in message.files] == [PNG, b""]


def test_the_core_does_not_import_pydantic_for_it() -> None:
    import subprocess

    program = "import sys, perdure as p; p.File(data=b'x', media_type='a/b'); print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
