"""Durable execution for AI agents: ``import perdure as p``.

The public surface, and nothing else: each name is taken from its module when it is first used, so importing this costs
nothing. What may be relied on stands in ``__all__``; everything in other modules may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.agent import events as events
    from perdure.agent.agent import Agent as Agent
    from perdure.agent.ephemeral import Result as Result
    from perdure.app import App as App
    from perdure.app import Authorizer as Authorizer
    from perdure.app import open as open  # noqa: A004 - the public name
    from perdure.definitions.files import File as File
    from perdure.definitions.policy import Policy as Policy
    from perdure.definitions.registry import Registration as Registration
    from perdure.definitions.tool import Secret as Secret
    from perdure.definitions.tool import ToolContext as ToolContext
    from perdure.definitions.tool import tool as tool
    from perdure.definitions.verdicts import Applied as Applied
    from perdure.definitions.verdicts import CancelRun as CancelRun
    from perdure.definitions.verdicts import NotApplied as NotApplied
    from perdure.definitions.verdicts import SafeToRetry as SafeToRetry
    from perdure.definitions.verdicts import StillUnknown as StillUnknown
    from perdure.definitions.verdicts import UnknownCall as UnknownCall
    from perdure.definitions.verdicts import Verdict as Verdict
    from perdure.engine.admission import Receipt as Receipt
    from perdure.errors import ApprovalSuspensionError as ApprovalSuspensionError
    from perdure.errors import Conflict as Conflict
    from perdure.errors import Corrupt as Corrupt
    from perdure.errors import Denied as Denied
    from perdure.errors import Error as Error
    from perdure.errors import Incompatible as Incompatible
    from perdure.errors import Invalid as Invalid
    from perdure.errors import OwnershipLost as OwnershipLost
    from perdure.errors import Refused as Refused
    from perdure.errors import RunCancelled as RunCancelled
    from perdure.errors import RunFailed as RunFailed
    from perdure.errors import Unavailable as Unavailable
    from perdure.errors import Unknown as Unknown
    from perdure.projections.approval import Approval as Approval
    from perdure.projections.effect import Effect as Effect
    from perdure.projections.run import Settlement as Settlement
    from perdure.workflow.dsl import Workflow as Workflow

__version__ = "0.1.0"

_MODULES = {
    "perdure.agent": ("events",),
    "perdure.agent.agent": ("Agent",),
    "perdure.agent.ephemeral": ("Result",),
    "perdure.app": ("App", "Authorizer", "open"),
    "perdure.definitions.files": ("File",),
    "perdure.definitions.policy": ("Policy",),
    "perdure.definitions.registry": ("Registration",),
    "perdure.definitions.tool": ("Secret", "ToolContext", "tool"),
    "perdure.definitions.verdicts": (
        "Applied", "CancelRun", "NotApplied", "SafeToRetry", "StillUnknown", "UnknownCall", "Verdict",
    ),
    "perdure.engine.admission": ("Receipt",),
    "perdure.errors": (
        "ApprovalSuspensionError", "Conflict", "Corrupt", "Denied", "Error", "Incompatible", "Invalid", "OwnershipLost",
        "Refused", "RunCancelled", "RunFailed", "Unavailable", "Unknown",
    ),
    "perdure.projections.approval": ("Approval",),
    "perdure.projections.effect": ("Effect",),
    "perdure.projections.run": ("Settlement",),
    "perdure.workflow.dsl": ("Workflow",),
}  # fmt: skip
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Agent",
    "App",
    "Applied",
    "Approval",
    "ApprovalSuspensionError",
    "Authorizer",
    "CancelRun",
    "Conflict",
    "Corrupt",
    "Denied",
    "Effect",
    "Error",
    "File",
    "Incompatible",
    "Invalid",
    "NotApplied",
    "OwnershipLost",
    "Policy",
    "Receipt",
    "Refused",
    "Registration",
    "Result",
    "RunCancelled",
    "RunFailed",
    "SafeToRetry",
    "Secret",
    "Settlement",
    "StillUnknown",
    "ToolContext",
    "Unavailable",
    "Unknown",
    "UnknownCall",
    "Verdict",
    "Workflow",
    "__version__",
    "events",
    "open",
    "tool",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    if name == "Agent":
        import_module("perdure.app")  # the composition root knows what a model's name stands for
    value = import_module(f"{home}.{name}") if name == "events" else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
