"""Every protection, switched off: the sweep must turn red. A green twin fails the build."""

from __future__ import annotations

import pytest

from crash.scenarios import named
from crash.twins import TWINS, Twin
from perdure.testing.crash import sweep


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_a_protection_switched_off_is_noticed(twin: Twin) -> None:
    report = sweep(
        named(twin.scenario), prepare=twin.switch, stop=lambda violation: twin.finding in str(violation), processes=1
    )
    print(f"{twin.name}: {report}")
    assert any(twin.finding in str(violation) for violation in report.violations), (
        f"Nothing noticed that this is off: {twin.switch.__doc__} {report}"
    )
