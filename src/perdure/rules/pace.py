"""How far ahead the calls of one model are counted: the state that everybody who calls it shares. Pure.

Whoever keeps it changes it in one transaction: a :class:`Pace` is read, a method gives the next, and that is stored.
"""

from __future__ import annotations

import msgspec

from perdure.rules.accounting import Rate, next_turn


class Pace(msgspec.Struct, frozen=True):
    """Instants in microseconds since 1970, 0 at first. What is past is as good as 0.

    Attributes:
        requests_at, tokens_at: up to where calls and reserved tokens fill the rate.
        held_until: nobody calls before, because the provider said so.
    """

    requests_at: int = 0
    tokens_at: int = 0
    held_until: int = 0

    def take(self, now: int, tokens: int, rate: Rate) -> tuple[Pace, int]:
        """One call that reserves ``tokens``.

        Returns:
            The next state and 0; or this state and the instant from which all of it is granted, if nobody takes
            anything until then.
        """
        requests_at, again = self.requests_at, 0
        if rate.requests is not None:
            requests_at, again = next_turn(requests_at, now, 1, rate.requests)
        tokens_at, later = self.tokens_at, 0
        if rate.tokens is not None:
            tokens_at, later = next_turn(tokens_at, now, tokens, rate.tokens)
        if self.held_until > now:
            later = max(later, self.held_until)
        if again or later:
            return self, max(again, later)
        return Pace(requests_at, tokens_at, self.held_until), 0

    def correct(self, now: int, reserved: int, used: int, rate: Rate) -> Pace:
        """What a call reserved and did not use is given back, what it used beyond is counted.

        Room that passed unused is lost: no correction makes more room than a whole minute's.
        """
        if rate.tokens is None:
            return self
        back = _span(reserved, rate.tokens) - _span(used, rate.tokens)
        return Pace(self.requests_at, max(max(self.tokens_at, now) - back, now), self.held_until)

    def hold(self, until: int) -> Pace:
        """Nobody calls before ``until``, nor before what was said earlier."""
        return Pace(self.requests_at, self.tokens_at, max(self.held_until, until))


def _span(tokens: int, a_minute: int) -> int:
    """The microseconds that tokens fill of the rate."""
    return next_turn(0, 0, tokens, a_minute)[0]
