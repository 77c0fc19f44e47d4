"""Google Gemini: generateContent and streamGenerateContent."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from perdure.ports.provider import Response
from perdure.records.parts import CallPart, ReasoningPart, TextPart
from support.fake_models.script import Asked, object_of, split, sse

PATH = re.compile(r"/v1(?:beta|alpha)?/models/(?P<model>[^/:]+):(?P<verb>generateContent|streamGenerateContent)\Z")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,127}\Z")
SEAL = "RS1n"  # what thought signatures of this server begin with: base64
DUMMIES = frozenset({"context_engineering_is_the_way_to_go", "skip_thought_signature_validator"})
PARAMETERS = ("parametersJsonSchema", "parameters_json_schema", "parameters")  # it reads names in both spellings
FINISH = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "refusal": "SAFETY", "other": "OTHER"}
STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}

WORDS = {
    "invalid": "Invalid value at 'generation_config.temperature' (TYPE_FLOAT), 9",
    "key": "API key not valid. Please pass a valid API key. {key}",
    "forbidden": "Method doesn't allow unregistered callers (callers without established identity).",
    "model": "models/{model} is not found for API version v1beta, or is not supported for generateContent. Call "
    "ListModels to see the list of available models and their supported methods.",
    "rate": "You exceeded your current quota, please check your plan and billing details.",
    "server": "An internal error has occurred. Please retry or report in https://developers.generativeai.google/guide",
    "overloaded": "The model is overloaded. Please try again later.",
    "context": "The input token count (1203310) exceeds the maximum number of tokens allowed (1048576).",
    "refused": "The prompt was blocked.",
    "session": "CachedContent not found (or permission denied)",
}


def error(why: str, message: str, model: str, key: str, code: int) -> dict[str, Any]:
    """An error as Google words it."""
    text = message or WORDS.get(why, "").format(model=model, key=key)
    if why == "key" and code == 401:
        text = (
            "Request had invalid authentication credentials. Expected OAuth 2 access token or other valid credential."
        )
    inner: dict[str, Any] = {"code": code, "message": text, "status": STATUS.get(code, "UNKNOWN")}
    base = "type.googleapis.com/google.rpc."
    if why == "rate":
        inner["details"] = [
            {
                "@type": f"{base}QuotaFailure",
                "violations": [{"quotaId": "GenerateRequestsPerMinutePerProjectPerModel"}],
            },
            {"@type": f"{base}RetryInfo", "retryDelay": "7s"},
        ]
    if why == "key" and code == 400:
        info = {"@type": f"{base}ErrorInfo", "reason": "API_KEY_INVALID", "domain": "googleapis.com"}
        inner["details"] = [info]
    return {"error": inner}


def asked(path: str, query: dict[str, str], body: dict[str, Any]) -> Asked:
    """What the request asks for."""
    named = PATH.search(path)
    assert named is not None
    contents = body.get("contents") or []
    users = [content for content in contents if content.get("role") == "user"]
    declared = [one for tool in body.get("tools") or () for one in tool.get("functionDeclarations") or ()]
    last = contents[-1]["parts"] if contents else []
    return Asked(
        turn=1 + sum(content.get("role") == "model" for content in contents),
        model=named["model"],
        stream=named["verb"] == "streamGenerateContent",
        tools=tuple(one["name"] for one in declared),
        question=next((part["text"] for part in users[0]["parts"] if "text" in part), "") if users else "",
        answered=any("functionResponse" in part for part in last),
    )


def objection(path: str, query: dict[str, str], body: dict[str, Any]) -> str | None:
    """Why Google would refuse this request with HTTP 400, if it would."""
    if "streamGenerateContent" in path and query.get("alt") != "sse":
        return "Only alt=sse is played here."
    contents = body.get("contents")
    if not isinstance(contents, list) or not contents:
        return "* GenerateContentRequest.contents: contents is not specified"
    for index, tool in enumerate(body.get("tools") or ()):
        for place, one in enumerate(tool.get("functionDeclarations") or ()):
            at = f"GenerateContentRequest.tools[{index}].function_declarations[{place}]"
            if not NAME.match(one.get("name", "")):
                return f"* {at}.name: Invalid function name."
            schema = next((one[name] for name in PARAMETERS if one.get(name)), {"type": "object"})
            if str(schema.get("type", "")).lower() != "object":
                return f"* {at}.parameters.type: should be OBJECT"
    config = body.get("generationConfig") or {}
    wants_schema = "responseJsonSchema" in config or "responseSchema" in config
    if wants_schema and config.get("responseMimeType") not in ("application/json", "text/x.enum"):
        return "* GenerateContentRequest.generation_config.response_mime_type: must be application/json"
    strict = path.rsplit("/", 1)[1].startswith("gemini-3")
    return _contents_objection(contents, strict)


def _contents_objection(contents: list[dict[str, Any]], strict: bool) -> str | None:
    open_calls: list[str] = []
    # Only the turn that goes on is checked for signatures: what follows the last text of the user.
    asked_last = max((i for i, c in enumerate(contents) if c.get("role") == "user" and _has(c, "text")), default=-1)
    for index, content in enumerate(contents):
        at = f"* GenerateContentRequest.contents[{index}].parts"
        if content.get("role") not in ("user", "model"):
            return "Please use a valid role: user, model."
        if not isinstance(content.get("parts"), list) or not content["parts"]:
            return f"{at}: contents.parts must not be empty."
        calls = [part for part in content["parts"] if "functionCall" in part]
        wrong = (
            _parts_objection(at, content["parts"])
            or _answers_objection(at, content["parts"], open_calls)
            or _calls_objection(at, calls, first=index == 0, of_model=content["role"] == "model")
        )
        if wrong is not None:
            return wrong
        if calls and strict and index > asked_last and "thoughtSignature" not in calls[0]:
            return "Function call is missing a thought_signature in functionCall parts. This is required for tools."
        open_calls = [part["functionCall"].get("name", "") for part in calls]
    if contents[-1]["role"] == "model":
        return "Please ensure that single turn requests end with a user role or a function response."
    return None


def _parts_objection(at: str, parts: list[dict[str, Any]]) -> str | None:
    for part in parts:
        if not {"text", "functionCall", "functionResponse", "inlineData", "fileData"} & set(part):
            return f"{at}: required oneof field 'data' must have one initialized field"
        if "thoughtSignature" in part and not _is_signed(part["thoughtSignature"]):
            return "Thought signature is not valid."
    return None


def _answers_objection(at: str, parts: list[dict[str, Any]], called: list[str]) -> str | None:
    answers = [part["functionResponse"] for part in parts if "functionResponse" in part]
    if sorted(one.get("name", "") for one in answers) != sorted(called):
        return (
            "Please ensure that the number of function response parts is equal to the number of function call parts of "
            "the function call turn."
        )
    if not all(isinstance(one.get("response"), dict) for one in answers):
        return f"{at}.function_response.response: must be a Struct"
    return None


def _calls_objection(at: str, calls: list[dict[str, Any]], *, first: bool, of_model: bool) -> str | None:
    if calls and (first or not of_model):
        return "Please ensure that function call turn comes immediately after a user turn or after a function response turn."
    if not all(isinstance(part["functionCall"].get("args", {}), dict) for part in calls):
        return f"{at}.function_call.args: must be a Struct"
    return None


def _has(content: dict[str, Any], field: str) -> bool:
    return any(field in part for part in content.get("parts") or ())


def _is_signed(signature: str) -> bool:
    plain = signature.replace("-", "+").replace("_", "/")
    try:
        text = base64.b64decode(plain + "=" * (-len(plain) % 4)).decode(errors="replace")
    except ValueError:
        return False
    return signature.startswith(SEAL) or signature in DUMMIES or text in DUMMIES


def _usage(response: Response) -> dict[str, Any]:
    usage = response.usage
    return {
        "promptTokenCount": usage.input,
        "cachedContentTokenCount": usage.cache_read,
        "candidatesTokenCount": usage.output - usage.reasoning,
        "thoughtsTokenCount": usage.reasoning,
        "totalTokenCount": usage.input + usage.output,
    }


def _parts(response: Response, asked: Asked, n: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for part in response.parts:
        match part:
            case ReasoningPart(text):
                out.append({"text": text, "thought": True})
            case TextPart(text):
                out.append({"text": text})
            case CallPart(name, arguments, id):
                named = {"id": id} if id else {}
                out.append({"functionCall": {"name": name, "args": object_of(arguments)} | named})
    if (place := _signed_place(out, asked.model)) is not None:
        out[place]["thoughtSignature"] = f"{SEAL}{n:04}{place:04}"
    return out


def _signed_place(parts: list[dict[str, Any]], model: str) -> int | None:
    """The part that is signed: a Gemini 3's first call, or last part; of others, the first part after thoughts."""
    calls = [place for place, part in enumerate(parts) if "functionCall" in part]
    rest = [place for place, part in enumerate(parts) if "thought" not in part]
    if model.startswith("gemini-3") and calls:
        return calls[0]
    if not rest or len(rest) == len(parts):
        return None
    return rest[-1] if model.startswith("gemini-3") else rest[0]


def _envelope(parts: list[dict[str, Any]], asked: Asked, n: int) -> dict[str, Any]:
    return {
        "candidates": [{"content": {"parts": parts, "role": "model"}, "index": 0}],
        "modelVersion": asked.model,
        "responseId": f"google-{n}",
    }


def blocked(asked: Asked, n: int) -> dict[str, Any]:
    """What answers a prompt that Google refuses: 200, and no candidate."""
    feedback = {"blockReason": "PROHIBITED_CONTENT"}
    usage = {"promptTokenCount": 110, "totalTokenCount": 110}
    return {
        "promptFeedback": feedback,
        "usageMetadata": usage,
        "modelVersion": asked.model,
        "responseId": f"google-{n}",
    }


def whole(response: Response, asked: Asked, n: int) -> bytes:
    """The answer as one JSON text."""
    answer = _envelope(_parts(response, asked, n), asked, n)
    if not response.parts:
        del answer["candidates"][0]["content"]["parts"]
    answer["candidates"][0]["finishReason"] = FINISH[response.finish]
    return json.dumps(answer | {"usageMetadata": _usage(response)}).encode()


def events(response: Response, asked: Asked, n: int) -> list[bytes]:
    """The answer as a stream; the end is told by the reason in its last event."""
    told: list[dict[str, Any]] = []
    for part in _parts(response, asked, n):
        if "text" in part:
            pieces = split(part["text"])
            told += [part | {"text": piece} for piece in pieces[:-1]] + [part | {"text": pieces[-1]}] if pieces else []
            for early in told[len(told) - len(pieces) : -1]:
                early.pop("thoughtSignature", None)
        else:
            told.append(part)
    answers = [_envelope([part], asked, n) for part in told] or [_envelope([{"text": ""}], asked, n)]
    if len(answers) == 1:  # so that there is a middle
        answers.insert(0, _envelope([{"text": ""}], asked, n))
    answers[-1]["candidates"][0]["finishReason"] = FINISH[response.finish]
    return [sse(answer | {"usageMetadata": _usage(response)}) for answer in answers]


def error_event(why: str, message: str, model: str, key: str) -> bytes:
    """An error within a stream."""
    return sse(error(why, message, model, key, 503 if why == "overloaded" else 500))
