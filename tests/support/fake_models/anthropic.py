"""Anthropic Messages."""

from __future__ import annotations

import json
import re
from typing import Any

from perdure.ports.provider import Response
from perdure.records.parts import CallPart, ReasoningPart, TextPart
from support.fake_models.script import Asked, object_of, split, sse

PATH = re.compile(r"/v1/messages\Z")
NAME = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")
SEAL = "Eq-"  # what signatures of this server begin with; redacted thinking too
STOP = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "refusal": "refusal", "other": "other"}

WORDS = {
    "invalid": ("invalid_request_error", "temperature: Input should be less than or equal to 1"),
    "key": ("authentication_error", "invalid x-api-key {key}"),
    "forbidden": ("permission_error", "Your API key does not have permission to use the specified resource."),
    "model": ("not_found_error", "model: {model}"),
    "rate": (
        "rate_limit_error",
        (
            "This request would exceed your organization's rate limit of 50 requests per minute. For details, refer to: "
            "https://docs.claude.com/en/api/rate-limits."
        ),
    ),
    "server": ("api_error", "Internal server error"),
    "overloaded": ("overloaded_error", "Overloaded"),
    "context": ("invalid_request_error", "prompt is too long: 208310 tokens > 200000 maximum"),
    "refused": ("invalid_request_error", "Output blocked by content filtering policy"),
    "session": ("not_found_error", "container: not found"),
}


def error(why: str, message: str, model: str, key: str, code: int) -> dict[str, Any]:
    """An error as Anthropic words it."""
    kind, words = WORDS.get(why, ("invalid_request_error", ""))
    inner = {"type": kind, "message": message or words.format(model=model, key=key)}
    return {"type": "error", "error": inner, "request_id": "req_fake"}


def asked(body: dict[str, Any]) -> Asked:
    """What the request asks for."""
    messages = body.get("messages") or []
    last = _blocks(messages[-1]) if messages else []
    users = [message for message in messages if message["role"] == "user"]
    return Asked(
        turn=1 + sum(message["role"] == "assistant" for message in messages),
        model=body.get("model", ""),
        stream=bool(body.get("stream")),
        tools=tuple(tool["name"] for tool in body.get("tools") or ()),
        question=next((b["text"] for b in _blocks(users[0]) if b["type"] == "text"), "") if users else "",
        answered=bool(last) and last[0]["type"] == "tool_result",
    )


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])


def objection(headers: dict[str, str], body: dict[str, Any]) -> str | None:
    """Why Anthropic would refuse this request with HTTP 400, if it would."""
    if "anthropic-version" not in headers:
        return "anthropic-version: header is required"
    for field, kind in (("model", str), ("max_tokens", int), ("messages", list)):
        if not isinstance(body.get(field), kind):
            return f"{field}: Field required"
    if body["max_tokens"] < 1:
        return "max_tokens: Input should be greater than or equal to 1"
    if not body["messages"]:
        return "messages: at least one message is required"
    return _options_objection(body) or _messages_objection(body)


def _options_objection(body: dict[str, Any]) -> str | None:
    names: list[str] = []
    for index, tool in enumerate(body.get("tools") or ()):
        if not NAME.match(tool.get("name", "")):
            return f"tools.{index}.custom.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'"
        if (tool.get("input_schema") or {}).get("type") != "object":
            return f"tools.{index}.custom.input_schema.type: Field required"
        names.append(tool["name"])
    if len(set(names)) < len(names):
        return "tools: Tool names must be unique."
    if body.get("tool_choice") is not None and not names:
        return "tool_choice: tool_choice may only be specified while providing tools"
    thinking = body.get("thinking") or {}
    if thinking.get("type") == "enabled":
        if not 1024 <= thinking.get("budget_tokens", 0) < body["max_tokens"]:
            return "`max_tokens` must be greater than `thinking.budget_tokens`."
        if body.get("temperature", 1) != 1:
            return "`temperature` may only be set to 1 when thinking is enabled."
        if (body.get("tool_choice") or {}).get("type") in ("any", "tool"):
            return "Thinking may not be enabled when tool_choice forces tool use."
    form = (body.get("output_config") or {}).get("format") or body.get("output_format")
    if form is not None and (form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict)):
        return "output_config.format.schema: Field required"
    marks = json.dumps([body.get("system"), body.get("tools"), body["messages"]]).count('"cache_control"')
    if marks > 4:
        return f"A maximum of 4 blocks with cache_control may be provided. Found {marks}."
    return None


def _messages_objection(body: dict[str, Any]) -> str | None:
    messages: list[dict[str, Any]] = body["messages"]
    thinks = (body.get("thinking") or {}).get("type") == "enabled"
    seen: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        role = message.get("role")
        if role not in ("user", "assistant"):
            return f'messages: Unexpected role "{role}". Allowed roles are "user" or "assistant".'
        if index == 0 and role != "user":
            return 'messages: first message must use the "user" role'
        if index and messages[index - 1]["role"] == role:
            return f'{where}: roles must alternate between "user" and "assistant"'
        blocks = _blocks(message)
        if not blocks:
            return f"{where}: all messages must have non-empty content"
        called = [b["id"] for b in _blocks(messages[index - 1]) if b["type"] == "tool_use"] if index else []
        wrong = (
            _user_objection(where, blocks, called)
            if role == "user"
            else _assistant_objection(where, blocks, seen, index == len(messages) - 1)
        )
        if wrong is not None:
            return wrong
    if messages[-1]["role"] == "assistant":
        last = messages[-1]
        if any(block["type"] == "tool_use" for block in _blocks(last)):
            return f"messages.{len(messages) - 1}: `tool_use` ids were found without `tool_result` blocks immediately after"
        return "This model does not support assistant message prefill. The conversation must end with a user message."
    return _last_turn_objection(messages) if thinks else None


def _last_turn_objection(messages: list[dict[str, Any]]) -> str | None:
    if len(messages) < 2 or _blocks(messages[-1])[0]["type"] != "tool_result":
        return None
    first = _blocks(messages[-2])[0]["type"]
    if first in ("thinking", "redacted_thinking"):
        return None
    return (
        f"messages.{len(messages) - 2}.content.0.type: Expected `thinking` or `redacted_thinking`, but found `{first}`. "
        "When `thinking` is enabled, a final `assistant` message must start with a thinking block."
    )


def _user_objection(where: str, blocks: list[dict[str, Any]], called: list[str]) -> str | None:
    answered: list[str] = []
    for place, block in enumerate(blocks):
        at = f"{where}.content.{place}"
        match block:
            case {"type": "tool_result", "tool_use_id": str(id)}:
                if id not in called:
                    return (
                        f"{at}: unexpected `tool_use_id` found in `tool_result` blocks: {id}. Each `tool_result` block "
                        "must have a corresponding `tool_use` block in the previous message."
                    )
                if id in answered:
                    return f"{at}: each tool_use must have a single result. Found multiple `tool_result` blocks: {id}"
                if len(answered) < place:
                    return f"{at}: tool_result blocks must come first"
                answered.append(id)
            case {"type": "text", "text": str(text)}:
                if not text.strip():
                    return f"{at}: text content blocks must contain non-whitespace text"
            case {"type": "image" | "document", "source": dict(source)}:
                if source.get("type") not in ("base64", "url", "text"):
                    return f"{at}.source: Input tag is not valid"
                if source["type"] == "base64" and not source.get("data"):
                    return f"{at}.source.base64.data: Field required"
            case _:
                return f"{at}: Input tag '{block.get('type')}' is not valid here"
    missing = [id for id in called if id not in answered]
    if missing:
        return (
            f"{where}: `tool_use` ids were found without `tool_result` blocks immediately after: {', '.join(missing)}. "
            "Each `tool_use` block must have a corresponding `tool_result` block in the next message."
        )
    return None


def _assistant_objection(where: str, blocks: list[dict[str, Any]], seen: set[str], last: bool) -> str | None:
    for place, block in enumerate(blocks):
        at = f"{where}.content.{place}"
        match block:
            case {"type": "text", "text": str(text)}:
                if not text.strip():
                    return f"{at}: text content blocks must contain non-whitespace text"
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": given}:
                if not NAME.match(id) or not NAME.match(name):
                    return f"{at}.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'"
                if not isinstance(given, dict):
                    return f"{at}.tool_use.input: Input should be a valid dictionary"
                if id in seen:
                    return f"{at}: `tool_use` ids must be unique"
                seen.add(id)
            case {"type": "thinking", "thinking": str(), "signature": str(signature)}:
                if not signature.startswith(SEAL):
                    return f"{at}: Invalid `signature` in `thinking` block"
            case {"type": "redacted_thinking", "data": str(data)}:
                if not data.startswith(SEAL):
                    return f"{at}: Invalid `data` in `redacted_thinking` block"
            case _:
                return f"{at}: Input tag '{block.get('type')}' is not valid here"
    return None


def _usage(response: Response) -> dict[str, Any]:
    usage = response.usage
    return {
        "input_tokens": usage.input - usage.cache_read - usage.cache_write,
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cache_read,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def _block(part: object, n: int, index: int) -> dict[str, Any]:
    match part:
        case ReasoningPart("", _, _):
            return {"type": "redacted_thinking", "data": f"{SEAL}redacted-{n}-{index}"}
        case ReasoningPart(text):
            return {"type": "thinking", "thinking": text, "signature": f"{SEAL}{n}-{index}"}
        case CallPart(name, arguments, id):
            return {"type": "tool_use", "id": id, "name": name, "input": object_of(arguments)}
        case TextPart(text):
            return {"type": "text", "text": text}
    raise AssertionError(part)


def whole(response: Response, asked: Asked, n: int) -> bytes:
    """The answer as one JSON text."""
    answer = {
        "id": f"msg_{n}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": [_block(part, n, index) for index, part in enumerate(response.parts)],
        "stop_reason": STOP[response.finish],
        "stop_sequence": None,
        "usage": _usage(response),
    }
    return json.dumps(answer).encode()


def events(response: Response, asked: Asked, n: int) -> list[bytes]:
    """The answer as a stream."""
    usage = _usage(response)
    message = json.loads(whole(Response((), response.finish, "", response.usage), asked, n))
    message |= {"stop_reason": None, "usage": usage | {"output_tokens": 1, "output_tokens_details": None}}
    out = [sse({"type": "message_start", "message": message}, "message_start"), sse({"type": "ping"}, "ping")]
    for index, part in enumerate(response.parts):
        block = _block(part, n, index)
        deltas: list[dict[str, Any]] = []
        match block["type"]:
            case "text":
                deltas = [{"type": "text_delta", "text": piece} for piece in split(block["text"])]
                block["text"] = ""
            case "thinking":
                deltas = [{"type": "thinking_delta", "thinking": piece} for piece in split(block["thinking"])]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
                block |= {"thinking": "", "signature": ""}
            case "tool_use":
                assert isinstance(part, CallPart)
                pieces = ["", *split(part.arguments)]
                deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
                block["input"] = {}
        at = {"index": index}
        out.append(sse({"type": "content_block_start", "content_block": block} | at, "content_block_start"))
        out += [sse({"type": "content_block_delta", "delta": delta} | at, "content_block_delta") for delta in deltas]
        out.append(sse({"type": "content_block_stop"} | at, "content_block_stop"))
    delta = {"stop_reason": STOP[response.finish], "stop_sequence": None}
    out.append(sse({"type": "message_delta", "delta": delta, "usage": usage}, "message_delta"))
    return [*out, sse({"type": "message_stop"}, "message_stop")]


def error_event(why: str, message: str, model: str, key: str) -> bytes:
    """An error within a stream."""
    return sse(error(why, message, model, key, 200), "error")
