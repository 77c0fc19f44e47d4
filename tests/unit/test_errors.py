"""The error tree is drawn once, and the drawing is true."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from perdure import errors
from perdure.errors import Conflict, Error, Invalid, Refused, RunFailed, Signal, Superseded, Unknown, ensure

CLASSES = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
}


def test_the_drawing_in_the_module_names_every_class_and_only_those() -> None:
    assert errors.__doc__ is not None
    drawn = set(re.findall(r"^(?: [├└]─ )?([A-Z]\w+)(?= |$)", errors.__doc__.split("The split is")[0], re.MULTILINE))
    assert drawn - {"Every"} == set(CLASSES)


def test_every_error_is_one_level_below_error_and_every_signal_below_signal() -> None:
    for kind in CLASSES.values():
        if kind not in (Error, Signal):
            assert kind.__bases__ in ((Error,), (Signal,))


def test_user_code_cannot_swallow_a_signal_by_accident() -> None:
    assert not issubclass(Superseded, Exception)
    assert issubclass(Superseded, BaseException)


def test_codes_are_distinct() -> None:
    codes = [kind.code for kind in CLASSES.values() if issubclass(kind, Error)]
    assert len(codes) == len(set(codes))


def test_a_message_says_what_to_do_next() -> None:
    assert str(Invalid("It is wrong.", help="Do this.")) == "It is wrong. Do this."
    assert str(Invalid("It is wrong.")) == "It is wrong."
    assert str(Invalid("", help="Do this.")) == "Do this."
    assert (Conflict("a", help="b").message, Conflict("a", help="b").help) == ("a", "b")


def test_refused_is_a_value() -> None:
    assert Refused("no") == Refused("no") != Refused("never")
    assert Refused("no") != Unknown("no")
    assert len({Refused("no"), Refused("no")}) == 1
    assert Refused("no").error == "no"


def test_a_failed_run_names_kind_and_unknown_effects() -> None:
    error = RunFailed("It failed.", kind="policy.turns", unknown=["eff_1"])
    assert (error.kind, error.unknown) == ("policy.turns", ("eff_1",))
    assert RunFailed().kind == "failed"


def test_errors_survive_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(RunFailed("It failed.", kind="output", unknown=["eff_1"], help="Look.")))
    assert (str(error), error.kind, error.unknown) == ("It failed. Look.", "output", ("eff_1",))
    assert pickle.loads(pickle.dumps(Refused("no", help="h"))) == Refused("no")


def test_ensure_is_never_stripped() -> None:
    ensure(True, Invalid("no"))
    with pytest.raises(Invalid, match="no"):
        ensure(0, Invalid("no"))
