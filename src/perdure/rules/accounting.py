"""What model calls cost, what is reserved for one before it is made, and how often it may be made. Pure.

Money is whole micro-USD (a millionth of a dollar), rounded up; a price is micro-USD for a million tokens, so that a
price in dollars per million tokens, times a million, is one.
"""

from __future__ import annotations

import msgspec

from perdure.errors import Invalid
from perdure.limits import RATE_WINDOW_SECONDS
from perdure.records.parts import Charge, Usage

_MILLION = 1_000_000
_BYTES_A_TOKEN = 3  # less than the 4 of English prose: a reservation errs upwards
_MESSAGE_TOKENS = 8  # what a message costs beside its text


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Micro-USD for a million tokens of each kind.

    Attributes:
        input: prompt tokens that no cache held. output: answer tokens.
        cache_read: prompt tokens read from a cache; None: as ``input``.
        cache_write: prompt tokens written to a cache; None: as ``input``.
        reasoning: reasoning tokens of the answer; None: as ``output``.
        version: names the table the price is from; recorded with each charge.
    """

    input: int
    output: int
    cache_read: int | None = None
    cache_write: int | None = None
    reasoning: int | None = None
    version: str = "custom"

    def __post_init__(self) -> None:
        rates = (self.input, self.output, self.cache_read, self.cache_write, self.reasoning)
        if any(type(rate) is not int or rate < 0 for rate in rates if rate is not None):
            raise Invalid(
                "A price is not a whole number of micro-USD for a million tokens.",
                help="Two dollars per million tokens are Price(input=2_000_000, ...).",
            )
        if not self.version:
            raise Invalid("A price has no version.", help='Say which table it is from, or leave out version="".')


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """How often a model may be called in a minute by all processes on one database together.

    Attributes:
        requests: calls a minute, None for no bound. tokens: reserved tokens a minute, None for no bound.
    """

    requests: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("requests", self.requests), ("tokens", self.tokens)):
            if value is not None and (type(value) is not int or value < 1):
                raise Invalid(f"Rate.{name} is {value!r:.64}.", help="Use a whole number from 1, or None.")


def _micro_usd(amount: int) -> int:
    """Rate times tokens as micro-USD, rounded up."""
    return -(-amount // _MILLION)


def cost(usage: Usage, price: Price) -> int:
    """Micro-USD of a response by its real usage, rounded up once."""
    cached = min(usage.cache_read + usage.cache_write, usage.input)
    reasoning = min(usage.reasoning, usage.output)
    read = price.input if price.cache_read is None else price.cache_read
    write = price.input if price.cache_write is None else price.cache_write
    thought = price.output if price.reasoning is None else price.reasoning
    return _micro_usd(
        (usage.input - cached) * price.input
        + usage.cache_read * read
        + usage.cache_write * write
        + (usage.output - reasoning) * price.output
        + reasoning * thought
    )


def estimate(text_bytes: int, messages: int = 1) -> int:
    """Tokens that text of a prompt has at most, by its size in bytes and the number of its messages."""
    return -(-text_bytes // _BYTES_A_TOKEN) + messages * _MESSAGE_TOKENS


def _worst(price: Price) -> tuple[int, int]:
    """The dearest rate of a prompt token and of an answer token."""
    return max(price.input, price.cache_read or 0, price.cache_write or 0), max(price.output, price.reasoning or 0)


def reserve(prompt_tokens: int, output_tokens: int, price: Price | None) -> Charge:
    """What one call may cost at most: its prompt and a full answer, each at its worst rate."""
    if price is None:
        return Charge(prompt_tokens, output_tokens)
    worst_in, worst_out = _worst(price)
    cost = _micro_usd(prompt_tokens * worst_in + output_tokens * worst_out)
    return Charge(prompt_tokens, output_tokens, cost, price.version)


def answer_for(micro_usd: int, prompt_tokens: int, price: Price) -> int:
    """The most tokens of an answer that so much money pays beside the prompt, at the worst rates; may be negative."""
    worst_in, worst_out = _worst(price)
    left = micro_usd * _MILLION - prompt_tokens * worst_in
    return left // worst_out if worst_out else (_MILLION if left >= 0 else -1)


def next_turn(at: int, now: int, amount: int, a_minute: int) -> tuple[int, int]:
    """One step of a rate limit that lets through ``a_minute`` at once and then evenly (GCRA).

    Args:
        at: the limit's state, an instant in microseconds; 0 at first. now: this instant.
        amount: what is asked for; more than a whole minute's worth counts as a minute's.

    Returns:
        The new state and 0 when it is granted; else the old state and the instant at which to ask again.
    """
    window = int(RATE_WINDOW_SECONDS * _MILLION)
    step = -(-min(amount, a_minute) * window // a_minute)
    after = max(at, now) + step
    if after - now > window:
        return at, after - window
    return after, 0
