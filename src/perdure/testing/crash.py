"""Crashes: die at the Nth durable boundary for every N, then at every pair of them; and real kills of real processes.

Each run has a folder of its own. A forked child plays the scenario and ends itself at a boundary; the next child, its
clock past the lease, plays it again to the end; then the parent judges what is left. SQLite, loops and threads exist in
children only. By default a child commits on its loop, so that the Nth boundary of a scenario is the same one each time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import importlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure.errors import Invalid, ensure
from perdure.ports.failpoints import Boundary, Phase
from perdure.testing.evidence import Expected, gather, judge
from perdure.testing.stage import Stage

__all__ = ["Expected", "Kill", "Scenario", "Stage", "SweepReport", "Violation", "kill", "sweep"]

KILLED = 137
_FAILED = 3
_CHILD_SECONDS_MAX = 40  # then the child is dead, or it hangs
_PROGRAM = f"import sys, {__name__} as crash; sys.exit(crash.main(*sys.argv[1:]))"
_VIOLATIONS_MAX = 50  # kept of one sweep
_MEMORY = Path("/dev/shm")  # noqa: S108 - a killed process tests no disk, so a disk in memory serves


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something a process does, and may die in.

    Attributes:
        name: unique among scenarios.
        play: plays it from its beginning on a ``Stage``, in every incarnation, until all its work is settled: opens the
            store, submits what is not submitted yet, and decides what a person would.
        expected: what is promised whatever dies.
    """

    name: str
    play: Callable[[Stage], Coroutine[Any, Any, None]]
    expected: Expected = field(default_factory=Expected)


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that a run broke.

    Attributes:
        deaths: where the incarnations of the run died: (N, ``boundary:phase``) each.
        text: what is broken.
    """

    deaths: tuple[tuple[int, str], ...]
    text: str

    def __str__(self) -> str:
        where = ", then ".join(f"at {n} ({point})" for n, point in self.deaths) or "without any death"
        return f"{self.text} [died {where}]" if self.deaths else f"{self.text} [{where}]"


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep did and found. True when nothing was broken.

    Attributes:
        scenario: its name. boundaries: what an untouched run passes.
        runs: runs in which somebody died. pairs: of those, runs with two deaths.
        reached: every ``boundary:phase`` at which a run could have died, by incarnations of all runs.
        violations: at most ``50`` of them, in order; ``broken`` runs in all.
        seconds: how long it took.
    """

    scenario: str
    boundaries: int
    runs: int
    pairs: int
    reached: frozenset[str]
    violations: tuple[Violation, ...]
    broken: int
    seconds: float

    def __bool__(self) -> bool:
        return not self.broken

    def __str__(self) -> str:
        said = f"{self.scenario}: {self.boundaries} boundaries, {self.runs} runs with a death"
        if self.pairs:
            said += f" ({self.pairs} with two)"
        said += f", {self.seconds:.1f} s, {self.broken} broken"
        return "\n  ".join([said, *map(str, self.violations[:8])])

    def to_dict(self) -> dict[str, object]:
        """The report as JSON values."""
        plain = dataclasses.asdict(self)
        return {**plain, "reached": sorted(self.reached), "violations": [str(v) for v in self.violations]}


@dataclass(frozen=True, slots=True)
class Kill:
    """A real process that was killed, and what was found afterwards. True when nothing was broken."""

    scenario: str
    point: str
    violations: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.violations


# -- one incarnation --------------------------------------------------------------------------------------------------


class _Trail:
    """The failpoint of a child: remembers every boundary and dies at the Nth."""

    def __init__(self, file: Path, die_at: int | None, die: Callable[[], None]) -> None:
        self._file = file
        self._die_at = die_at
        self._die = die
        self.points: list[str] = []

    def __call__(self, boundary: Boundary, phase: Phase | str) -> None:
        self.points.append(f"{boundary}:{phase}")
        if len(self.points) == self._die_at:
            self.save()
            self._die()

    def save(self) -> None:
        self._file.write_text("\n".join(self.points))


@dataclass(frozen=True, slots=True)
class _Way:
    """How runs of one sweep are played."""

    scenario: Scenario
    threaded: bool
    split: bool
    prepare: Callable[[], object] | None
    place: Path


def _incarnate(way: _Way, folder: Path, incarnation: int, die_at: int | None) -> tuple[int, list[str]]:
    """Fork a child that plays the scenario. Its exit code and the boundaries it passed."""
    trail = folder / f"trail-{incarnation}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child touches nothing of other threads
        child = os.fork()
    if child == 0:
        code = _FAILED
        try:
            gc.disable()  # a collection would copy every page of the parent
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_CHILD_SECONDS_MAX)
            if way.prepare is not None:
                way.prepare()
            failpoint = _Trail(trail, die_at, lambda: os._exit(KILLED))
            code = _play(way.scenario, folder, incarnation, failpoint, threaded=way.threaded, split=way.split)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, trail.read_text().splitlines() if trail.exists() else []


def _play(scenario: Scenario, folder: Path, incarnation: int, failpoint: _Trail, *, threaded: bool, split: bool) -> int:
    """Play to the end in this process. 0, or the code of a failure whose story is in the folder."""
    logger = logging.getLogger("perdure")
    logger.handlers = [logging.FileHandler(folder / f"log-{incarnation}", delay=True)]
    logger.propagate = False
    stage = Stage(folder, incarnation, failpoint=failpoint, threaded=threaded, split=split)
    try:
        asyncio.run(scenario.play(stage))
    except BaseException:  # noqa: BLE001 - whatever it is, the parent is told
        (folder / f"failure-{incarnation}").write_text(traceback.format_exc())
        return _FAILED
    finally:
        failpoint.save()
    return 0


# -- one run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """One run: where its incarnations died, what they passed, what is broken."""

    deaths: tuple[tuple[int, str], ...]
    trails: list[list[str]]
    broken: list[str]


def _run(way: _Way, *die_at: int) -> _Run:
    """Play with a death at each given boundary (as far as they are reached), then to the end, and judge."""
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=way.place))
    deaths: list[tuple[int, str]] = []
    trails: list[list[str]] = []
    broken: list[str] = []
    for incarnation, at in enumerate([*die_at, None]):
        code, trail = _incarnate(way, folder, incarnation, at)
        trails.append(trail)
        if code == KILLED and at is not None:
            deaths.append((at, trail[-1]))
            continue
        if code != 0:
            broken.append(_failure(folder, incarnation, code))
        break
    broken += _judged(way, folder, len(deaths))
    if not broken:
        shutil.rmtree(folder)
    return _Run(tuple(deaths), trails, broken)


def _failure(folder: Path, incarnation: int, code: int) -> str:
    story = folder / f"failure-{incarnation}"
    if story.exists():
        return f"Incarnation {incarnation} failed: {story.read_text().strip().splitlines()[-1]} (see {folder})"
    if code == -signal.SIGALRM:
        return f"Incarnation {incarnation} hung for {_CHILD_SECONDS_MAX} s (see {folder})."
    return f"Incarnation {incarnation} ended with {code} (see {folder})."


def _judged(way: _Way, folder: Path, deaths: int) -> list[str]:
    try:
        return judge(gather(folder, deaths, split=way.split), way.scenario.expected)
    except Exception as error:  # noqa: BLE001 - a store that cannot be read is the worst finding of all
        return [f"What is left cannot be read: {type(error).__name__}: {error}"]


# -- sweeps -----------------------------------------------------------------------------------------------------------


def sweep(
    scenario: Scenario,
    *,
    pairs: bool = False,
    threaded: bool = False,
    split: bool = False,
    processes: int = 1,
    prepare: Callable[[], object] | None = None,
    folder: str | os.PathLike[str] | None = None,
    stop: Callable[[Violation], bool] | None = None,
) -> SweepReport:
    """Let a process die at every boundary of a scenario, one run each, and judge every run.

    Args:
        scenario: what is played.
        pairs: also let the second incarnation die, at each of its boundaries, for each boundary of the first.
        threaded: commit from a writer thread, as in production; the order of boundaries then varies between runs.
        split: keep log and ledger in two files; there is a boundary between their commits then.
        processes: runs side by side.
        prepare: called in each child before it plays: a negative control switches a protection off here.
        folder: where runs leave their folders while they last, and broken ones for ever; a fresh one by default.
        stop: stop (each process) at the first run with a violation for which this holds.

    Raises:
        Invalid: called while a loop runs in this thread.
    """
    _check_no_loop()
    began = time.perf_counter()
    place = _fresh("perdure-crash-") if folder is None else Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    way = _Way(scenario, threaded, split, prepare, place)
    whole = _run(way)
    shards = range(max(1, processes))
    tally = _Tally()
    tally.add(whole)
    if not tally.enough(stop):
        least = len(whole.trails[0])
        works = [
            functools.partial(_shard, way, range(i + 1, least + 1, len(shards)), stop, pairs=pairs) for i in shards
        ]
        for found in _side_by_side(works, place):
            tally.merge(found)
    if not tally.broken and folder is None:
        shutil.rmtree(place, ignore_errors=True)
    return SweepReport(
        scenario.name,
        len(whole.trails[0]),
        tally.runs,
        tally.pairs,
        frozenset(tally.reached),
        tuple(tally.violations[:_VIOLATIONS_MAX]),
        tally.broken,
        time.perf_counter() - began,
    )


def _check_no_loop() -> None:
    """A child must not inherit a running loop, and the parent judges on one of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise Invalid("sweep and kill run loops of their own.", help="Call them from plain code, not from a coroutine.")


def _fresh(prefix: str) -> Path:
    memory = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_MEMORY if memory else None))


class _Tally:
    """What the runs of a sweep add up to."""

    def __init__(self) -> None:
        self.runs = 0
        self.pairs = 0
        self.broken = 0
        self.reached: set[str] = set()
        self.violations: list[Violation] = []

    def add(self, run: _Run) -> None:
        self.runs += len(run.deaths) > 0
        self.pairs += len(run.deaths) > 1
        self.broken += bool(run.broken)
        self.reached.update(point for trail in run.trails for point in trail)
        self.violations += [Violation(run.deaths, text) for text in run.broken]
        del self.violations[_VIOLATIONS_MAX:]

    def enough(self, stop: Callable[[Violation], bool] | None) -> bool:
        """Whether what was looked for is found."""
        return stop is not None and any(map(stop, self.violations))

    def merge(self, other: _Tally) -> None:
        self.runs += other.runs
        self.pairs += other.pairs
        self.broken += other.broken
        self.reached |= other.reached
        self.violations = sorted([*self.violations, *other.violations], key=lambda v: v.deaths)

    def to_json(self) -> str:
        violations = [(v.deaths, v.text) for v in self.violations]
        return json.dumps([self.runs, self.pairs, self.broken, sorted(self.reached), violations])

    @classmethod
    def from_json(cls, text: str) -> _Tally:
        tally = cls()
        tally.runs, tally.pairs, tally.broken, reached, violations = json.loads(text)
        tally.reached = set(reached)
        tally.violations = [Violation(tuple((n, point) for n, point in deaths), said) for deaths, said in violations]
        return tally


def _shard(way: _Way, least: range, stop: Callable[[Violation], bool] | None, *, pairs: bool) -> _Tally:
    """Deaths at each N of ``least``, and on in its steps until a run is untouched."""
    tally = _Tally()
    n = least.start
    while True:
        run = _run(way, n)
        tally.add(run)
        if tally.enough(stop) or (not run.deaths and n >= least.stop - 1):
            return tally
        if pairs:
            m = 1
            while True:
                second = _run(way, n, m)
                if len(second.deaths) < 2:
                    break
                tally.add(second)
                if tally.enough(stop):
                    return tally
                m += 1
        n += least.step


def _side_by_side(works: Iterable[Callable[[], _Tally]], place: Path) -> list[_Tally]:
    """Do each piece of work in a process of its own; a single one here."""
    todo = list(works)
    if len(todo) == 1:
        return [todo[0]()]
    children: list[tuple[int, Path]] = []
    for index, work in enumerate(todo):
        file = place / f"shard-{os.getpid()}-{index}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            code = _FAILED
            try:
                file.write_text(work().to_json())
                code = 0
            except BaseException:  # noqa: BLE001 - told to the parent by the exit code
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append((child, file))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, _ in children]
    ensure(not any(codes), Invalid(f"A process of the sweep ended with {max(codes, key=abs)}."))
    found = [_Tally.from_json(file.read_text()) for _, file in children]
    for _, file in children:
        file.unlink()
    return found


# -- real kills -------------------------------------------------------------------------------------------------------


def kill(scenario: Scenario, point: str = "dispatch:after", *, nth: int = 1) -> Kill:
    """SIGKILL a real process that stands at a boundary, then let another one finish, and judge.

    The process plays the scenario, tells over a pipe that it has come to the boundary, and blocks there until it is
    killed; nothing is timed. Commits go through the writer thread, as in production.

    Args:
        scenario: found by its name in the module that defines its ``play``, there at the top or in a tuple or list.
        point: ``boundary:phase``; where a run never passes it, the process is killed in the middle of its boundaries.
        nth: the how-manieth passage.

    Raises:
        Invalid: the scenario cannot be found by another process, or a loop runs in this thread.
    """
    _check_no_loop()
    find(scenario.play.__module__, scenario.name)
    folder = _fresh("perdure-kill-")
    way = _Way(scenario, True, False, None, folder)
    _, trail = _incarnate(way, Path(tempfile.mkdtemp(prefix="plan-", dir=folder)), 0, None)
    passages = [n for n, passed in enumerate(trail, 1) if passed == point]
    chosen = point if len(passages) >= nth else trail[len(trail) // 2]
    if chosen != point:
        nth = 1
    stood = _killed(scenario, folder, chosen, nth)
    broken = [] if stood else [f"The process ended before it came to {chosen}."]
    code = _spawn(scenario, folder, incarnation=1).wait()
    if code != 0:
        broken.append(_failure(folder, 1, code))
    broken += _judged(way, folder, 1)
    if not broken:
        shutil.rmtree(folder)
    return Kill(scenario.name, chosen, tuple(broken))


def _killed(scenario: Scenario, folder: Path, point: str, nth: int) -> bool:
    """Whether the process came to the point; it is dead either way."""
    ours, theirs = os.pipe()
    process = _spawn(scenario, folder, incarnation=0, pipe=theirs, point=point, nth=nth)
    os.close(theirs)
    try:
        stood = os.read(ours, 1) == b"!"  # or the end of the pipe, when the process ends by itself
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        os.close(ours)
    return stood


def _spawn(
    scenario: Scenario, folder: Path, *, incarnation: int, pipe: int | None = None, point: str = "", nth: int = 0
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    module = scenario.play.__module__
    where = [str(folder), str(incarnation), str(-1 if pipe is None else pipe), point, str(nth)]
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, module, scenario.name, *where],
        env=environment,
        pass_fds=() if pipe is None else (pipe,),
        stdin=subprocess.DEVNULL,
    )


def find(module: str, name: str) -> Scenario:
    """The scenario of this name in a module.

    Raises:
        Invalid: there is none.
    """
    for value in vars(importlib.import_module(module)).values():
        for candidate in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(candidate, Scenario) and candidate.name == name:
                return candidate
    raise Invalid(f"Module {module} has no scenario {name!r}.", help="Keep it at the top of the module, or in a tuple.")


def main(module: str, name: str, folder: str, incarnation: str, pipe: str, point: str, nth: str) -> int:
    """A process of :func:`kill`."""
    signal.alarm(_CHILD_SECONDS_MAX)

    def stand() -> None:
        os.write(int(pipe), b"!")
        threading.Event().wait()

    trail = Path(folder) / f"trail-{incarnation}"
    failpoint = _Standing(trail, stand, point, int(nth)) if point else _Trail(trail, None, lambda: None)
    return _play(find(module, name), Path(folder), int(incarnation), failpoint, threaded=True, split=False)


class _Standing(_Trail):
    """Blocks at the nth passage of a point, on whatever thread that is, until the process is killed."""

    def __init__(self, file: Path, stand: Callable[[], None], point: str, nth: int) -> None:
        super().__init__(file, None, stand)
        self._point = point
        self._left = nth

    def __call__(self, boundary: Boundary, phase: Phase | str) -> None:
        super().__call__(boundary, phase)
        self._left -= self.points[-1] == self._point
        if not self._left:
            self._die()
