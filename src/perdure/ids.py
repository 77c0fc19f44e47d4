"""Identity is derived, never drawn: the same logical thing gets the same id, so a repeat is a read. Pure.

Every derived id is the SHA-256 of a versioned JSON tuple (never of joined strings, so no separator can merge two
identities), cut to 120 bits and written in base 32 behind the kind it names. ``clock.Ids`` draws what is truly new.
"""

from __future__ import annotations

import base64
import hashlib
import unicodedata

import msgspec

from perdure.errors import Invalid
from perdure.limits import ID_CHARS_MAX

_VERSION = 1
_encode = msgspec.json.Encoder().encode


def derive(kind: str, *parts: str | int | None) -> str:
    """The id of ``kind`` that these parts name: ``kind_`` and 24 characters of ``a-z2-7``."""
    raw = hashlib.sha256(_encode([_VERSION, kind, *parts])).digest()[:15]
    return kind + "_" + base64.b32encode(raw).decode().lower()


def run_id(submission: str) -> str:
    """The run of a submission: the same suffix, so either finds the other without an index."""
    return "run_" + submission.removeprefix("sub_")


def submission_of(run_or_submission: str) -> str:
    """The submission id of a submission id, of its run's id, or of the id of a part of that run (``RUN.TASK.TRY``)."""
    if not run_or_submission.startswith("run_"):
        return run_or_submission
    return "sub_" + run_or_submission[4:].partition(".")[0]


def submission_id(thread: str, principal: str, key: str) -> str:
    """The submission that a caller's idempotency key names on a thread."""
    return derive("sub", thread, principal, key)


def keyed_thread_id(principal: str, program: str, key: str) -> str:
    """The thread of work submitted with a key and no thread."""
    return derive("thread", principal, program, key)


def call_id(turn: int, position: int) -> str:
    """A tool call's place within its run. The provider's own id is drawn anew at each answer, so it names nothing."""
    return f"{turn}.{position}"


def effect_id(run: str, task: str, attempt: int, ordinal: int, operation: str, input_digest: str) -> str:
    """One try of one effect. ``task`` is a call's place for an agent; ``ordinal`` counts effects within it."""
    return derive("eff", run, task, attempt, ordinal, operation, input_digest)


def idempotency_key(lineage: str, task: str, ordinal: int, input_digest: str, generation: int) -> str:
    """The key a remote may de-duplicate on. It survives crashes, retries and verdicts; ``generation`` changes it."""
    return derive("key", lineage, task, ordinal, input_digest, generation)


def step_key(key: str, name: str) -> str:
    """The key of one named step inside a call whose own key is ``key``."""
    return derive("key", key, name)


def approval_id(run: str, call: str, tool: str, version: str, arguments_digest: str) -> str:
    """An approval request: bound to run, call, tool, version and the exact arguments."""
    return derive("apr", run, call, tool, version, arguments_digest)


def check_id(value: object, what: str) -> str:
    """``value`` if it is a legal id or key: printable Unicode in NFC, 1 to 256 characters, not blank.

    The one rule for every identity that comes from outside: API, command line and documents alike.

    Raises:
        Invalid: it is not; the message says why.
    """
    if not isinstance(value, str):
        raise Invalid(f"{what} is a {type(value).__name__}, not text.")
    if value.isascii() and value.isprintable() and len(value) <= ID_CHARS_MAX and value and not value.isspace():
        return value
    shown = repr(value if len(value) <= 40 else value[:40] + "…")
    help = f"Use printable Unicode text in NFC, 1 to {ID_CHARS_MAX} characters, not blank."
    if not value:
        raise Invalid(f"{what} is empty.", help=help)
    if len(value) > ID_CHARS_MAX:
        raise Invalid(f"{what} {shown} has {len(value):,} characters.", help=help)
    if not value.isprintable():
        raise Invalid(f"{what} {shown} holds a control character, a lone surrogate or another unprintable.", help=help)
    if value.isspace():
        raise Invalid(f"{what} {shown} is blank.", help=help)
    if not value.isascii() and not unicodedata.is_normalized("NFC", value):
        raise Invalid(f"{what} {shown} is not in Unicode normal form C.", help=help)
    return value
