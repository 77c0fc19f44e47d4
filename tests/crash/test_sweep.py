"""Die at every boundary of every scenario, go on, and be judged by the world and by people."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest

from crash.scenarios import SCENARIOS, named
from perdure.ports.failpoints import DISPATCHES, Boundary
from perdure.testing.crash import SweepReport, kill, sweep

PROCESSES = min(8, max(2, os.cpu_count() or 2))
NAMES = [scenario.name for scenario in SCENARIOS]

# boundary: why no scenario reaches it
UNREACHED: dict[Boundary, str] = {}


@functools.cache
def swept(name: str) -> SweepReport:
    return sweep(named(name), processes=PROCESSES)


@pytest.mark.parametrize("name", NAMES)
def test_a_death_at_any_boundary_breaks_nothing(name: str) -> None:
    report = swept(name)
    print(report)
    assert report, str(report)
    assert report.runs  # it ends when a run passes untouched; how many boundaries one has may depend on timing


@pytest.mark.timeout(900)  # alone it sweeps everything
def test_every_boundary_is_reached_or_it_is_said_why_not(
    tmp_path: Path, record_property: pytest.FixtureRequest
) -> None:
    reports = [swept(name) for name in NAMES]
    reached = frozenset().union(*(report.reached for report in reports))
    expected = {
        f"{boundary}:{phase}"
        for boundary in Boundary
        if boundary not in UNREACHED
        for phase in (("before", "after") if boundary in DISPATCHES else ("before", "inside", "after"))
    }
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps([report.to_dict() for report in reports], indent=1))
    runs, seconds = sum(report.runs for report in reports), sum(report.seconds for report in reports)
    record_property(  # type: ignore[operator]
        "notice",
        f"crash sweep: {len(reports)} scenarios, {runs} deaths, {len(reached)} boundaries and phases,"
        f" {sum(report.broken for report in reports)} broken, {seconds:.0f} s ({file})",
    )
    assert reached == expected


def test_scenarios_have_names_of_their_own() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_process_breaks_nothing(name: str) -> None:
    """A real process, its writer thread and all, is killed with SIGKILL where a body has just returned."""
    killed = kill(named(name))
    print(f"{name}: killed at {killed.point}")
    assert killed, "\n".join(killed.violations)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_two_deaths_at_any_two_boundaries_break_nothing(name: str) -> None:
    report = sweep(named(name), pairs=True, processes=PROCESSES)
    print(report)
    assert report, str(report)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_death_breaks_nothing_while_a_thread_commits(name: str) -> None:
    report = sweep(named(name), threaded=True, processes=PROCESSES)
    print(report)
    assert report, str(report)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("point", ["claim:inside", "response:after", "settle:inside"])
def test_a_process_killed_inside_a_transaction_breaks_nothing(name: str, point: str) -> None:
    killed = kill(named(name), point)
    assert killed, "\n".join(killed.violations)
