"""OpenAI Responses: input items, stored responses, reasoning that comes back encrypted."""

from __future__ import annotations

import json
import re
from typing import Any

from perdure.ports.provider import Response
from perdure.records.parts import CallPart, ReasoningPart, TextPart
from support.fake_models.chat import NAME, is_object, strict_objection
from support.fake_models.chat import error as chat_error
from support.fake_models.script import Asked, split, sse

PATH = re.compile(r"/(?:openai/)?v1/responses\Z")
SEAL = "gAAAA-"  # what encrypted reasoning of this server begins with
CONTEXT = "Your input exceeds the context window of this model. Please adjust your input and try again."
_OUTPUT = frozenset({"function_call", "reasoning"})


class Stored:
    """What the server remembers: the items of each response that was stored."""

    def __init__(self) -> None:
        self._items: dict[str, list[dict[str, Any]]] = {}

    def expire(self) -> None:
        """Forget every response."""
        self._items.clear()

    def __contains__(self, id: object) -> bool:
        return id in self._items

    def keep(self, id: str, items: list[dict[str, Any]]) -> None:
        """Remember the conversation up to and with a response."""
        self._items[id] = items

    def history(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The items of the whole conversation."""
        given = body.get("input") or []
        if isinstance(given, str):
            given = [{"type": "message", "role": "user", "content": given}]
        return [*self._items.get(body.get("previous_response_id") or "", ()), *given]

    def item_ids(self) -> set[str]:
        """Ids of stored items, which may be named instead of repeated."""
        return {item["id"] for items in self._items.values() for item in items if "id" in item}


def error(why: str, message: str, model: str, key: str, code: int) -> dict[str, Any]:
    """An error as OpenAI words it."""
    body = chat_error(why, message, model, key, code)
    if why == "context" and not message:
        body["error"] |= {"message": CONTEXT, "param": "input"}
    return body


def kind_of(item: dict[str, Any]) -> str:
    """The type of an item, which messages may leave out."""
    return str(item.get("type") or "message")


def is_said(item: dict[str, Any]) -> bool:
    """Whether an item is what a model said."""
    return kind_of(item) in _OUTPUT or item.get("role") == "assistant"


def asked(items: list[dict[str, Any]], body: dict[str, Any]) -> Asked:
    """What the request asks for."""
    said = [is_said(item) for item in items]
    users = [item for item in items if item.get("role") == "user"]
    return Asked(
        turn=1 + sum(now and not before for before, now in zip([False, *said], said, strict=False)),
        model=body.get("model", ""),
        stream=bool(body.get("stream")),
        tools=tuple(tool["name"] for tool in body.get("tools") or () if tool.get("type") == "function"),
        question=_text(users[0].get("content")) if users else "",
        answered=bool(items) and kind_of(items[-1]) == "function_call_output",
    )


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or [])


def objection(body: dict[str, Any], stored: Stored) -> tuple[str, str] | None:
    """Why OpenAI would refuse this request, and the code of its error, if it would."""
    if not isinstance(body.get("model"), str):
        return "Missing required parameter: 'model'.", "missing_required_parameter"
    previous = body.get("previous_response_id")
    if previous is not None and previous not in stored:
        return f"Previous response with id '{previous}' not found.", "previous_response_not_found"
    items = stored.history(body)
    if not items:
        return "Missing required parameter: 'input'.", "missing_required_parameter"
    wrong = _tools_objection(body) or _items_objection(items, stored)
    return (wrong, "invalid_value") if isinstance(wrong, str) else wrong


def _tools_objection(body: dict[str, Any]) -> str | None:
    for index, tool in enumerate(body.get("tools") or ()):
        if tool.get("type") != "function" or not NAME.match(tool.get("name", "")):
            return f"Invalid 'tools[{index}]'."
        if (tool.get("parameters") or {}).get("type") != "object":
            return f"Invalid schema for function '{tool['name']}': schema must be of type 'object'."
    form = (body.get("text") or {}).get("format") or {}
    if form.get("type") == "json_schema":
        if not NAME.match(form.get("name", "")) or not isinstance(form.get("schema"), dict):
            return "Missing required parameter: 'text.format.schema'."
        return strict_objection(form["schema"]) if form.get("strict") else None
    return None


def _items_objection(items: list[dict[str, Any]], stored: Stored) -> str | tuple[str, str] | None:
    open_calls: list[str] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        following = items[index + 1] if index + 1 < len(items) else {}
        match kind_of(item):
            case "function_call":
                if not item.get("call_id") or not NAME.match(item.get("name", "")):
                    return f"Invalid '{where}'."
                if not is_object(item.get("arguments")):
                    return f"Invalid '{where}.arguments': not a JSON object."
                if item["call_id"] in open_calls:
                    return f"Duplicate call_id {item['call_id']} in '{where}'."
                open_calls.append(item["call_id"])
            case "function_call_output":
                if item.get("call_id") not in open_calls:
                    return f"No tool call found for function call output with call_id {item.get('call_id')}."
                open_calls.remove(item["call_id"])
            case "reasoning":
                if (problem := _reasoning_objection(item, following, stored)) is not None:
                    return problem
            case "message":
                if item.get("role") not in {"system", "developer", "user", "assistant"}:
                    return f"Invalid value: '{item.get('role')}' ({where}.role)."
                if open_calls and item["role"] != "assistant":
                    return f"No tool output found for function call {open_calls[0]}."
                if (problem := _content_objection(where, item)) is not None:
                    return problem
            case other:
                return f"Invalid value: '{other}' ({where}.type)."
    return f"No tool output found for function call {open_calls[0]}." if open_calls else None


def _reasoning_objection(
    item: dict[str, Any], following: dict[str, Any], stored: Stored
) -> str | tuple[str, str] | None:
    id, sealed = item.get("id", ""), item.get("encrypted_content")
    if sealed is None and id not in stored.item_ids():
        return (
            f"Item with id '{id}' not found. Items are not persisted when `store` is set to false.",
            "item_not_found",
        )
    if sealed is not None and not str(sealed).startswith(SEAL):
        return (
            f"The encrypted content for item {id} could not be verified.",
            "invalid_encrypted_content",
        )
    if not is_said(following):
        return f"Item '{id}' of type 'reasoning' was provided without its required following item."
    return None


def _content_objection(where: str, item: dict[str, Any]) -> str | None:
    content = item.get("content")
    if isinstance(content, str):
        return None
    if not isinstance(content, list) or not content:
        return f"Invalid type for '{where}.content'."
    for part in content:
        match part:
            case {"type": "output_text", "text": str()} if item["role"] == "assistant":
                pass
            case {"type": "refusal", "refusal": str()} if item["role"] == "assistant":
                pass
            case {"type": "input_text", "text": str()} if item["role"] != "assistant":
                pass
            case {"type": "input_image", "image_url": str()} if item["role"] == "user":
                pass
            case {"type": "input_file"} if item["role"] == "user" and {"file_data", "file_url", "file_id"} & set(part):
                pass
            case _:
                return f"Invalid value in '{where}.content': {json.dumps(part)[:100]}"
    return None


def output_of(response: Response, body: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """The output items of an answer."""
    sealed = "reasoning.encrypted_content" in (body.get("include") or ())
    out: list[dict[str, Any]] = []
    for index, part in enumerate(response.parts):
        match part:
            case ReasoningPart(text):
                item: dict[str, Any] = {"id": f"rs_{n}_{index}", "type": "reasoning"}
                item["summary"] = [{"type": "summary_text", "text": text}] if text else []
                out.append(item | ({"encrypted_content": f"{SEAL}{n}_{index}"} if sealed else {}))
            case TextPart(text):
                piece: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
                if response.finish == "refusal":
                    piece = {"type": "refusal", "refusal": text}
                base = {"id": f"msg_{n}_{index}", "type": "message", "role": "assistant", "status": "completed"}
                out.append(base | {"content": [piece]})
            case CallPart(name, arguments, id):
                call = {"id": f"fc_{n}_{index}", "type": "function_call", "status": "completed", "call_id": id}
                out.append(call | {"name": name, "arguments": arguments})
    return out


def envelope(response: Response, asked: Asked, body: dict[str, Any], n: int) -> dict[str, Any]:
    """The response object."""
    usage = response.usage
    incomplete = "max_output_tokens" if response.finish == "length" else None
    return {
        "id": f"resp_{n}",
        "object": "response",
        "created_at": 1,
        "status": "incomplete" if incomplete else "completed",
        "error": None,
        "incomplete_details": {"reason": incomplete} if incomplete else None,
        "instructions": body.get("instructions"),
        "model": f"{asked.model}-2026-10-01",
        "output": output_of(response, body, n),
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "store": body.get("store", True),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": [],
        "temperature": 1.0,
        "top_p": 1.0,
        "usage": {
            "input_tokens": usage.input,
            "input_tokens_details": {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.cache_write},
            "output_tokens": usage.output,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.input + usage.output,
        },
    }


def whole(response: Response, asked: Asked, body: dict[str, Any], n: int) -> bytes:
    """The answer as one JSON text."""
    return json.dumps(envelope(response, asked, body, n)).encode()


def events(response: Response, asked: Asked, body: dict[str, Any], n: int) -> list[bytes]:
    """The answer as a stream."""
    complete = envelope(response, asked, body, n)
    begun = complete | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    told: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(complete["output"]):
        place = {"item_id": item["id"], "output_index": index}
        empty = {"message": {"content": []}, "function_call": {"arguments": ""}, "reasoning": {"summary": []}}
        opened = item | empty[item["type"]] | {"status": "in_progress"}
        told.append({"type": "response.output_item.added", "output_index": index, "item": opened})
        told += _item_events(item, place)
        told.append({"type": "response.output_item.done", "output_index": index, "item": item})
    told.append({"type": f"response.{complete['status']}", "response": complete})
    return [sse(event | {"sequence_number": number}, event["type"]) for number, event in enumerate(told)]


def _item_events(item: dict[str, Any], place: dict[str, Any]) -> list[dict[str, Any]]:
    if item["type"] == "function_call":
        name = "response.function_call_arguments"
        deltas = [{"type": f"{name}.delta", "delta": piece} | place for piece in split(item["arguments"])]
        return [*deltas, {"type": f"{name}.done", "arguments": item["arguments"], "name": item["name"]} | place]
    if item["type"] == "message":
        part = item["content"][0]
        field = "refusal" if part["type"] == "refusal" else "text"
        name = "response.refusal" if field == "refusal" else "response.output_text"
        at = place | {"content_index": 0}
        more = {"logprobs": []} if field == "text" else {}
        return [
            {"type": "response.content_part.added", "part": part | {field: ""}} | at,
            *({"type": f"{name}.delta", "delta": piece} | at | more for piece in split(part[field])),
            {"type": f"{name}.done", field: part[field]} | at | more,
            {"type": "response.content_part.done", "part": part} | at,
        ]
    out: list[dict[str, Any]] = []
    for index, part in enumerate(item["summary"]):
        at = place | {"summary_index": index}
        out.append({"type": "response.reasoning_summary_part.added", "part": part | {"text": ""}} | at)
        out += [{"type": "response.reasoning_summary_text.delta", "delta": piece} | at for piece in split(part["text"])]
        out.append({"type": "response.reasoning_summary_text.done", "text": part["text"]} | at)
        out.append({"type": "response.reasoning_summary_part.done", "part": part} | at)
    return out


def error_event(why: str, message: str, model: str, key: str) -> bytes:
    """An error within a stream."""
    inner = error(why, message, model, key, 200)["error"]
    return sse({"type": "error", "sequence_number": 99} | {name: inner[name] for name in ("code", "message", "param")})
