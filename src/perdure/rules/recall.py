"""Searching long-term memory: tokens, vectors and scores. Pure and deterministic; nothing is learned and nothing is fetched.

A text score is the share of the query's distinct words that an entry holds; a vector score the cosine of hashed words
(``local_hash``), which finds the same words in any order and nothing that merely means the same. Scores are whole
numbers up to a million; an entry of score 0 is no result.
"""

from __future__ import annotations

import array
import hashlib
import re
import sys
import unicodedata
from collections.abc import Iterable
from typing import Literal

Mode = Literal["text", "vector", "hybrid"]
MILLION = 1_000_000
_WORDS = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """The words of a text: runs of letters and digits, normalised, without case."""
    return _WORDS.findall(unicodedata.normalize("NFKC", text).casefold())


def embed(text: str, dimensions: int) -> bytes:
    """The vector of a text: length 1, little-endian float32; each word is added at a place and with a sign of its hash."""
    values = [0.0] * dimensions
    for word in words(text):
        digest = hashlib.sha256(word.encode()).digest()
        values[int.from_bytes(digest[:2]) % dimensions] += 1.0 if digest[2] & 1 else -1.0
    length = sum(value * value for value in values) ** 0.5
    return pack(value / length for value in values) if length else pack(values)


def pack(values: Iterable[float]) -> bytes:
    """Numbers as little-endian float32."""
    found = array.array("f", values)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def unpack(raw: bytes) -> array.array[float]:
    """Numbers of little-endian float32."""
    found: array.array[float] = array.array("f")
    found.frombytes(raw)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def text_score(query: frozenset[str], text: str) -> int:
    """The share of the query's words that a text holds, times a million."""
    return len(query & set(words(text))) * MILLION // len(query) if query else 0


def vector_score(query: array.array[float], vector: bytes) -> int:
    """The cosine of two vectors of length 1, not below 0, times a million; 0 where they have other dimensions."""
    found = unpack(vector)
    if len(found) != len(query):
        return 0
    cosine = sum(a * b for a, b in zip(query, found, strict=True))
    return round(max(0.0, min(1.0, cosine)) * MILLION)


class Query:
    """A search, prepared once for every entry it looks at."""

    def __init__(self, text: str, mode: Mode, dimensions: int) -> None:
        self._words = frozenset(words(text))
        self._vector = unpack(embed(text, dimensions))
        self._mode = mode

    def score(self, text: str, vector: bytes) -> int:
        """How well an entry fits, 0 to a million."""
        if self._mode == "text":
            return text_score(self._words, text)
        if self._mode == "vector":
            return vector_score(self._vector, vector)
        return (text_score(self._words, text) + vector_score(self._vector, vector)) // 2
