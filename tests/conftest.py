"""What every test may rely on: one event loop library, chance that repeats, and long tests only on request."""

from __future__ import annotations

import pytest
from hypothesis import settings

# The gate must give the same answer twice; `make sweep` looks further, with other examples each time.
settings.register_profile("gate", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", max_examples=2_000, deadline=None, print_blob=True)
settings.load_profile("gate")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="long: runs with --long (make sweep)"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what a passing test wants to be known: ``record_property("notice", text)``."""
    properties = [pair for report in terminalreporter.getreports("passed") for pair in report.user_properties]
    notices = [text for name, text in properties if name == "notice"]
    if notices:
        terminalreporter.section("notices")
        terminalreporter.write_line("\n".join(map(str, notices)))


@pytest.fixture
def anyio_backend() -> str:
    """Async tests carry ``pytest.mark.anyio`` and run on asyncio, the only loop Perdure supports."""
    return "asyncio"
