"""Chat Completions, of OpenAI and of Azure."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from perdure.ports.provider import Response
from perdure.records.parts import CallPart, ReasoningPart, TextPart
from support.fake_models.script import Asked, split, sse

OPENAI = re.compile(r"/v1/chat/completions\Z")
AZURE = re.compile(r"/openai/(?:deployments/(?P<model>[^/]+)|v1)/chat/completions\Z")
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
FINISH = {"stop": "stop", "tool_calls": "tool_calls", "length": "length", "refusal": "content_filter", "other": "other"}
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

WORDS = {
    "invalid": ("Invalid value for 'temperature'.", "invalid_request_error", "temperature", "invalid_value"),
    "key": (
        "Incorrect API key provided: {key}. You can find your API key at https://platform.openai.com/account/api-keys.",
        "invalid_request_error",
        None,
        "invalid_api_key",
    ),
    "forbidden": ("You are not allowed to use this model.", "invalid_request_error", None, "permission_denied"),
    "model": (
        "The model `{model}` does not exist or you do not have access to it.",
        "invalid_request_error",
        None,
        "model_not_found",
    ),
    "rate": (
        "Rate limit reached for {model} on requests per min (RPM): Limit 3, Used 3, Requested 1.",
        "requests",
        None,
        "rate_limit_exceeded",
    ),
    "server": (
        "The server had an error while processing your request. Sorry about that!",
        "server_error",
        None,
        None,
    ),
    "overloaded": (
        "The engine is currently overloaded, please try again later.",
        "server_error",
        None,
        "service_unavailable",
    ),
    "context": (
        (
            "This model's maximum context length is 128000 tokens. However, your messages resulted in 131402 tokens. "
            "Please reduce the length of the messages."
        ),
        "invalid_request_error",
        "messages",
        "context_length_exceeded",
    ),
    "refused": (
        (
            "Invalid prompt: your prompt was flagged as potentially violating our usage policy. Please try again with a "
            "different prompt."
        ),
        "invalid_request_error",
        None,
        "invalid_prompt",
    ),
    "session": (
        "Previous response with id 'resp_gone' not found.",
        "invalid_request_error",
        "previous_response_id",
        "previous_response_not_found",
    ),
}
AZURE_WORDS = {
    "key": (
        "401",
        (
            "Access denied due to invalid subscription key or wrong API endpoint. Make sure to provide a valid key for an "
            "active subscription and use a correct regional API endpoint for your resource."
        ),
    ),
    "model": (
        "DeploymentNotFound",
        (
            "The API deployment for this resource does not exist. If you created the deployment within the last 5 minutes, "
            "please wait a moment and try again."
        ),
    ),
    "rate": (
        "429",
        (
            "Requests to the ChatCompletions_Create Operation under Azure OpenAI API version 2024-10-21 have exceeded call "
            "rate limit of your current OpenAI S0 pricing tier. Please retry after 7 seconds."
        ),
    ),
}


def error(why: str, message: str, model: str, key: str, code: int) -> dict[str, Any]:
    """An error as OpenAI words it."""
    words, kind, param, name = WORDS.get(why, ("", "invalid_request_error", None, None))
    text = message or words.format(model=model, key=key)
    return {"error": {"message": text, "type": kind, "param": param, "code": name}}


def azure_error(why: str, message: str, model: str, key: str, code: int) -> dict[str, Any]:
    """An error as Azure words it: its gateway's own, else as OpenAI's."""
    if why in AZURE_WORDS and not message:
        name, text = AZURE_WORDS[why]
        return {"error": {"code": name, "message": text}}
    if why == "refused":
        filtered = {"filtered": True, "severity": "high"}
        return {
            "error": {
                "message": "The response was filtered due to the prompt triggering Azure OpenAI's content management "
                "policy. Please modify your prompt and retry.",
                "type": None,
                "param": "prompt",
                "code": "content_filter",
                "status": 400,
                "innererror": {
                    "code": "ResponsibleAIPolicyViolation",
                    "content_filter_result": {"violence": filtered},
                },
            }
        }
    return error(why, message, model, key, code)


def asked(path: str, query: dict[str, str], body: dict[str, Any]) -> Asked:
    """What the request asks for."""
    named = AZURE.search(path)
    messages = body.get("messages") or []
    return Asked(
        turn=1 + sum(message["role"] == "assistant" for message in messages),
        model=(named and named["model"]) or body.get("model", ""),
        stream=bool(body.get("stream")),
        tools=tuple(tool["function"]["name"] for tool in body.get("tools") or ()),
        question=next((text_of(m["content"]) for m in messages if m["role"] == "user"), ""),
        answered=bool(messages) and messages[-1]["role"] == "tool",
    )


def text_of(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or [])


def objection(path: str, query: dict[str, str], headers: dict[str, str], body: dict[str, Any]) -> str | None:
    """Why the provider would refuse this request with HTTP 400, if it would."""
    if path.startswith("/openai/deployments/") and not query.get("api-version"):
        return "Missing required query parameter: 'api-version'."
    if "/deployments/" not in path and not isinstance(body.get("model"), str):
        return "you must provide a model parameter"
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        return "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty array."
    if (wrong := tools_objection(body)) is not None:
        return wrong
    options = body.get("stream_options")
    if options is not None and not body.get("stream"):
        return "The 'stream_options' parameter is only allowed when 'stream' is enabled."
    return _messages_objection(body["messages"])


def _messages_objection(messages: list[dict[str, Any]]) -> str | None:
    open_calls: list[str] = []
    for index, message in enumerate(messages):
        where = f"messages.[{index}]"
        role = message.get("role")
        if role not in ROLES:
            return f"Invalid value: '{role}'. Supported values are: {sorted(ROLES)}."
        if role == "tool":
            if message.get("tool_call_id") not in open_calls:
                return (
                    "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with "
                    f"'tool_calls' ({where})."
                )
            open_calls.remove(message["tool_call_id"])
            continue
        if open_calls:
            return _unanswered(open_calls)
        if role == "assistant":
            calls = message.get("tool_calls")
            if calls == []:
                return f"Invalid '{where}.tool_calls': empty array."
            open_calls = [call["id"] for call in calls or ()]
            if (wrong := _calls_objection(where, calls or [])) is not None:
                return wrong
            if not calls and not message.get("content"):
                return f"Invalid value for 'content': expected a string, got null ({where})."
        elif (wrong := _content_objection(where, role, message.get("content"))) is not None:
            return wrong
    return _unanswered(open_calls) if open_calls else None


def _unanswered(calls: list[str]) -> str:
    return (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        f"The following tool_call_ids did not have response messages: {', '.join(calls)}"
    )


def _calls_objection(where: str, calls: list[dict[str, Any]]) -> str | None:
    ids = Counter(call["id"] for call in calls)
    if any(count > 1 or not id for id, count in ids.items()):
        return f"Invalid '{where}.tool_calls': ids must be unique and not empty."
    for call in calls:
        if not NAME.match(call["function"]["name"]):
            return f"Invalid '{where}.tool_calls.function.name': string does not match '^[a-zA-Z0-9_-]+$'."
        if not is_object(call["function"]["arguments"]):
            return f"Invalid '{where}.tool_calls.function.arguments': not a JSON object."
    return None


def _content_objection(where: str, role: str, content: Any) -> str | None:
    if isinstance(content, str):
        return None
    if not isinstance(content, list) or not content:
        return f"Invalid value for 'content' of {where}: expected a string or an array of parts."
    for part in content:
        match part:
            case {"type": "text", "text": str()}:
                pass
            case {"type": "image_url", "image_url": {"url": str(url)}} if role == "user" and _address(url):
                pass
            case {"type": "input_audio", "input_audio": {"data": str(), "format": "wav" | "mp3"}} if role == "user":
                pass
            case {"type": "file", "file": {"file_data": str(data)}} if role == "user" and data.startswith("data:"):
                pass
            case _:
                return f"Invalid content part in {where}: {json.dumps(part)[:100]}"
    return None


def _address(url: str) -> bool:
    return url.startswith(("http://", "https://")) or bool(re.match(r"data:image/[a-z+]+;base64,.", url))


def tools_objection(body: dict[str, Any]) -> str | None:
    """What is wrong with the tools and the wanted form of the answer."""
    names: list[str] = []
    for index, tool in enumerate(body.get("tools") or ()):
        function = tool.get("function") or {}
        if tool.get("type") != "function" or not NAME.match(function.get("name", "")):
            return f"Invalid 'tools[{index}]'."
        if (function.get("parameters") or {}).get("type") != "object":
            return f"Invalid schema for function '{function['name']}': schema must be of type 'object'."
        names.append(function["name"])
    if len(set(names)) < len(names):
        return "Invalid 'tools': names must be unique."
    if body.get("tools") == []:
        return "Invalid 'tools': empty array."
    if body.get("tool_choice") is not None and not names:
        return "'tool_choice' is only allowed when 'tools' are specified."
    form = body.get("response_format")
    if form is not None and form.get("type") == "json_schema":
        wanted = form.get("json_schema") or {}
        if not NAME.match(wanted.get("name", "")) or not isinstance(wanted.get("schema"), dict):
            return "Missing required parameter: 'response_format.json_schema'."
        return strict_objection(wanted["schema"]) if wanted.get("strict") else None
    return None


def strict_objection(schema: dict[str, Any]) -> str | None:
    """What strict mode demands of a schema: objects at the top, closed, every property required."""
    if schema.get("type") != "object":
        return f"Invalid schema for response_format: schema must be of type 'object', got '{schema.get('type')}'."
    for place in _objects(schema):
        if place.get("additionalProperties") is not False:
            return (
                "Invalid schema for response_format: 'additionalProperties' is required to be supplied and to be false."
            )
        if set(place.get("required", ())) != set(place.get("properties", {})):
            return "Invalid schema for response_format: 'required' must include every key in properties."
    return None


def _objects(schema: Any) -> list[dict[str, Any]]:
    if isinstance(schema, list):
        return [found for item in schema for found in _objects(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if schema.get("type") == "object" else []
    return own + [found for value in schema.values() for found in _objects(value)]


def is_object(text: Any) -> bool:
    """Whether text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, TypeError, RecursionError):
        return False


def _usage(response: Response) -> dict[str, Any]:
    usage = response.usage
    return {
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
        "total_tokens": usage.input + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cache_read},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def _call(call: CallPart, arguments: str) -> dict[str, Any]:
    return {"id": call.provider_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _parts(response: Response) -> tuple[str, str, list[CallPart]]:
    text = "".join(part.text for part in response.parts if isinstance(part, TextPart))
    reasoning = "".join(part.text for part in response.parts if isinstance(part, ReasoningPart))
    return text, reasoning, [part for part in response.parts if isinstance(part, CallPart)]


def whole(response: Response, asked: Asked, n: int) -> bytes:
    """The answer as one JSON text."""
    text, reasoning, calls = _parts(response)
    message: dict[str, Any] = {"role": "assistant", "content": text or None, "refusal": None}
    if response.finish == "refusal":
        message |= {"content": None, "refusal": text}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    message |= {"tool_calls": [_call(call, call.arguments) for call in calls]} if calls else {}
    finish = "stop" if response.finish == "refusal" else FINISH[response.finish]
    answer = {
        "id": f"chatcmpl-{n}",
        "object": "chat.completion",
        "created": 1,
        "model": f"{asked.model}-2026-10-01",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": _usage(response),
    }
    return json.dumps(answer).encode()


def events(response: Response, asked: Asked, n: int) -> list[bytes]:
    """The answer as a stream."""
    base = {
        "id": f"chatcmpl-{n}",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": f"{asked.model}-2026-10-01",
    }

    def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return sse(base | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": None})

    text, reasoning, calls = _parts(response)
    field = "refusal" if response.finish == "refusal" else "content"
    out = [event({"role": "assistant", "content": ""})]
    out += [event({"reasoning_content": piece}) for piece in split(reasoning)]
    out += [event({field: piece}) for piece in split(text)]
    for index, call in enumerate(calls):
        out.append(event({"tool_calls": [{"index": index} | _call(call, "")]}))
        for piece in split(call.arguments):
            out.append(event({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}))
    out.append(event({}, "stop" if response.finish == "refusal" else FINISH[response.finish]))
    out.append(sse(base | {"choices": [], "usage": _usage(response)}))
    return [*out, b"data: [DONE]\n\n"]


def error_event(why: str, message: str, model: str, key: str) -> bytes:
    """An error within a stream."""
    return sse(error(why, message, model, key, 200))
