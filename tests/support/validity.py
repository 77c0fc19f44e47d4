"""What every provider demands of a conversation, as one check of the messages we would send."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from perdure.ports.provider import AssistantMessage, Message, SystemMessage, ToolMessage, UserMessage
from perdure.records.parts import CallPart

_LEGAL = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


def faults(messages: Sequence[Message]) -> list[str]:
    """What a provider would refuse; nothing when the conversation is valid."""
    found: list[str] = []
    seen: set[str] = set()
    for index, message in enumerate(messages):
        following = messages[index + 1] if index + 1 < len(messages) else None
        previous = messages[index - 1] if index else None
        if isinstance(message, SystemMessage) and index:
            found.append(f"{index}: instructions after the beginning")
        if isinstance(message, ToolMessage) and not _called(previous):
            found.append(f"{index}: results without calls before them")
        if isinstance(message, AssistantMessage):
            found += [f"{index}: {fault}" for fault in _faults(message, following, seen)]
    if not messages or not isinstance(messages[-1], UserMessage | ToolMessage):
        found.append("the last message is not the user's or a tool's")
    return found


def _called(message: Message | None) -> bool:
    return isinstance(message, AssistantMessage) and any(isinstance(part, CallPart) for part in message.parts)


def _faults(message: AssistantMessage, following: Message | None, seen: set[str]) -> list[str]:
    found: list[str] = []
    calls = [part for part in message.parts if isinstance(part, CallPart)]
    for call in calls:
        if not _LEGAL.match(call.provider_id):
            found.append(f"id {call.provider_id!r} is not legal")
        if call.provider_id in seen:
            found.append(f"id {call.provider_id!r} is used twice")
        seen.add(call.provider_id)
        if not _LEGAL.match(call.name):
            found.append(f"name {call.name!r} is not legal")
        if not _is_object(call.arguments):
            found.append(f"arguments {call.arguments[:40]!r} are no JSON object")
    if not message.parts:
        found.append("an empty answer")
    if not calls:
        return found
    if not isinstance(following, ToolMessage):
        return [*found, "calls without results after them"]
    answered = [result.provider_id for result in following.results]
    if answered != [call.provider_id for call in calls]:
        found.append(f"calls {[call.provider_id for call in calls]} are answered as {answered}")
    if [result.name for result in following.results] != [call.name for call in calls]:
        found.append("results under other names than their calls")
    if not all(isinstance(result.content, str) and result.content for result in following.results):
        found.append("a result without content")
    return found


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text.encode()), dict)
    except (ValueError, RecursionError):
        return False
