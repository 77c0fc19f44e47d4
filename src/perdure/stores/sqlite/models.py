"""How often each model may be called by all processes on this file together."""

from __future__ import annotations

from perdure.rules.accounting import Rate
from perdure.rules.pace import Pace
from perdure.stores.sqlite.rows import Rows

_PACE = "SELECT requests_at, tokens_at, held_until FROM model WHERE name = ?"
_PUT = """INSERT INTO model (name, requests_at, tokens_at, held_until) VALUES (?, ?, ?, ?)
 ON CONFLICT (name) DO UPDATE SET requests_at = excluded.requests_at, tokens_at = excluded.tokens_at,
 held_until = excluded.held_until"""


class Models(Rows):
    """The verbs of models; see ``ports.ledger.Ledger``."""

    def _pace(self, model: str) -> Pace:
        row = self._row(_PACE, model)
        return Pace() if row is None else Pace(*row)

    def _step(self, model: str, before: Pace, after: Pace) -> None:
        if after != before:
            self._execute(_PUT, (model, after.requests_at, after.tokens_at, after.held_until))

    def take_model_turn(self, model: str, now: int, tokens: int, rate: Rate) -> int:
        """See ``ports.ledger.Ledger.take_model_turn``."""
        pace = self._pace(model)
        after, again = pace.take(now, tokens, rate)
        self._step(model, pace, after)
        return again

    def correct_model_turn(self, model: str, now: int, reserved: int, used: int, rate: Rate) -> None:
        """See ``ports.ledger.Ledger.correct_model_turn``."""
        pace = self._pace(model)
        self._step(model, pace, pace.correct(now, reserved, used, rate))

    def hold_model(self, model: str, until: int) -> None:
        """See ``ports.ledger.Ledger.hold_model``."""
        pace = self._pace(model)
        self._step(model, pace, pace.hold(until))

    def model_held_until(self, model: str) -> int:
        """See ``ports.ledger.Ledger.model_held_until``."""
        row = self._row("SELECT held_until FROM model WHERE name = ?", model)
        return 0 if row is None else int(row[0])
