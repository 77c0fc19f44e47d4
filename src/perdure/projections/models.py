"""Model calls as people read them: tries that gave no response, what they may have cost, what is charged meanwhile."""

from __future__ import annotations

import msgspec

from perdure.records import codec
from perdure.records.parts import NO_CHARGE, NO_EVIDENCE, Charge, Evidence
from perdure.records.run import (
    ModelCallFailed,
    ModelCallPrepared,
    ModelCallResolved,
    ModelCallUnknown,
    ModelResponseInterrupted,
    ModelResponseRecorded,
)

_INTERRUPTED = "An earlier worker vanished; its call may have been served."
_NOT_SERVED = ("not_applied", "refused")


class Charged(msgspec.Struct, frozen=True):
    """What calls that may have been served are charged: their reservations.

    Attributes:
        input: estimated tokens of the prompts. output: the most tokens the answers may have.
        cost: US dollars at the worst rate, None without a price. prices: version of the price; empty for a sum.
    """

    input: int
    output: int
    cost: float | None
    prices: str = ""


class ModelTry(msgspec.Struct, frozen=True):
    """One try of a model call that gave no response.

    Attributes:
        attempt: number of the try within its turn, from 1. model: empty where nobody recorded it.
        status: ``started`` (in flight), ``failed``, ``unknown`` (a ``once`` call that waits for a verdict or has one) or
            ``interrupted`` (an earlier worker vanished and may have made it).
        dispatched: ``no`` it surely never left, ``yes`` the provider answered with a failure, ``unknown`` it may have
            been served.
        kind, message: of its failure. request_id, http_status: what the provider answered with, where it did.
        effect: id of its effect, None for a call that may be repeated. verdict: the one given on it, None without one.
        charged: what it counts against the budgets; None for nothing.
        double_charge: the provider may have charged it beside the call that gave the response.
    """

    attempt: int
    status: str
    dispatched: str
    model: str = ""
    kind: str = ""
    message: str = ""
    request_id: str = ""
    http_status: int | None = None
    effect: str | None = None
    verdict: str | None = None
    charged: Charged | None = None
    double_charge: bool = False


def dollars(micro_usd: int | None) -> float | None:
    """Micro-USD as US dollars."""
    return None if micro_usd is None else micro_usd / 1_000_000


def charged(charge: Charge) -> Charged | None:
    """A charge as it is shown; None for nothing."""
    if not (charge.input or charge.output or charge.cost):
        return None
    return Charged(charge.input, charge.output, dollars(charge.cost), charge.prices)


def seen(evidence: Evidence) -> Evidence | None:
    """What the wire showed, None where it showed nothing."""
    return None if evidence == NO_EVIDENCE else evidence


class Tries:
    """The tries of one run that gave no response, by turn, taken from its records in order."""

    def __init__(self) -> None:
        self._turns: dict[int, list[ModelTry]] = {}

    def of(self, turn: int) -> tuple[ModelTry, ...]:
        """Those of a turn, oldest first."""
        return tuple(self._turns.get(turn, ()))

    def take(self, record: codec.Record) -> None:
        """Take the next record of the run."""
        match record:
            case ModelCallPrepared(effect=effect) if effect:
                self._add(record.turn, status="started", dispatched="unknown", model=record.model, effect=effect)
            case ModelCallFailed():
                self._end(record.turn, record.effect)
                self._add_failed(record)
            case ModelCallUnknown():
                self._end(record.turn, record.effect)
                self._add(
                    record.turn, status="unknown", dispatched="unknown", model=record.model, message=record.reason,
                    request_id=record.evidence.request_id, http_status=record.evidence.status, effect=record.effect,
                    charged=charged(record.charged), double_charge=True,
                )  # fmt: skip
            case ModelCallResolved():
                self._resolve(record)
            case ModelResponseInterrupted():
                self._add(
                    record.turn, status="interrupted", dispatched="unknown", message=_INTERRUPTED,
                    charged=charged(record.charged), double_charge=True,
                )  # fmt: skip
            case ModelResponseRecorded():
                self._end(record.turn, record.effect)
                if any(one.verdict == "applied" for one in self.of(record.turn)):
                    self._change(record.turn, record.effect, double_charge=False)  # it is the call that was served
            case _:
                pass

    def _add(self, turn: int, **fields: object) -> None:
        tries = self._turns.setdefault(turn, [])
        tries.append(msgspec.structs.replace(ModelTry(len(tries) + 1, "", ""), **fields))

    def _add_failed(self, record: ModelCallFailed) -> None:
        self._add(
            record.turn, status="failed", dispatched=record.dispatched, model=record.model, kind=record.failure.kind,
            message=record.failure.message, request_id=record.evidence.request_id, http_status=record.evidence.status,
            effect=record.effect or None, charged=charged(record.charged), double_charge=record.dispatched == "unknown",
        )  # fmt: skip

    def _end(self, turn: int, effect: str) -> None:
        """The try in flight came to something: that is shown instead."""
        tries = self._turns.get(turn, [])
        if effect and tries and tries[-1].effect == effect and tries[-1].status == "started":
            tries.pop()

    def _change(self, turn: int, effect: str, **fields: object) -> None:
        tries = self._turns.get(turn, [])
        for index, one in enumerate(tries):
            if one.effect == effect:
                tries[index] = msgspec.structs.replace(one, **fields)

    def _resolve(self, record: ModelCallResolved) -> None:
        self._change(record.turn, record.effect, verdict=record.verdict)
        if record.verdict in _NOT_SERVED:
            self._change(record.turn, record.effect, charged=None, double_charge=False)
        if record.failure is not None:
            self._change(record.turn, record.effect, kind=record.failure.kind, message=record.failure.message)


def outstanding(charge: Charge) -> Charged | None:
    """The sum of a run's charges as it is shown; None when nothing is outstanding."""
    return charged(msgspec.structs.replace(charge, prices="")) if charge != NO_CHARGE else None
