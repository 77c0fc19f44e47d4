"""Every model provider on loopback: one script, five wire formats, faults exact at the socket.

In a test: ``with FakeModels() as server``. From a shell: ``python -m support.fake_models`` in ``tests``.
"""

from support.fake_models.script import (
    FAULTS,
    FORMATS,
    LONG_TEXT,
    USAGE,
    Answer,
    Asked,
    Break,
    Fault,
    Format,
    Odd,
    Raw,
    Status,
)
from support.fake_models.server import FakeModels, Seen, journal_of

__all__ = [
    "FAULTS",
    "FORMATS",
    "LONG_TEXT",
    "USAGE",
    "Answer",
    "Asked",
    "Break",
    "FakeModels",
    "Fault",
    "Format",
    "Odd",
    "Raw",
    "Seen",
    "Status",
    "journal_of",
]
