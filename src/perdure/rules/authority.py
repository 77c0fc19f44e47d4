"""Whether a policy lets a task touch the world, and whether somebody is asked first. Pure.

The order is part of the contract: what is denied by name, then what is not allowed by name, then providers, then the mode
of approval, then what the thing itself demands. The last can only add a question, never take one away.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

ApprovalMode = Literal["never", "mutations", "high_risk", "always"]
MUTATIONS = frozenset({"workspace_mutate", "external_mutate", "process_execution", "remote_agent"})
HIGH_RISKS = frozenset({"high", "critical"})


class Touch(msgspec.Struct, frozen=True):
    """What is about to be touched.

    Attributes:
        names: the names a policy may mean it by: its capability, its operation, its tool.
        kind: the kind of effect. risk: as declared. provider: of a model call, else empty.
        approval: what the thing's own contract demands. remote: a protocol call that is a mutation unless declared
            otherwise.
    """

    names: tuple[str, ...]
    kind: str
    risk: str
    provider: str = ""
    approval: Literal["policy", "never", "always"] = "policy"
    remote: bool = False


class Allowed(msgspec.Struct, frozen=True):
    """It may be done."""


class Refused(msgspec.Struct, frozen=True):
    """It may not be done; nothing is dispatched."""

    reason: str


class Asked(msgspec.Struct, frozen=True):
    """A person must approve it first."""

    reason: str


Authority = Allowed | Refused | Asked


def decide(
    touch: Touch,
    *,
    mode: ApprovalMode,
    allow: Collection[str] = (),
    deny: Collection[str] = (),
    providers: Collection[str] = (),
) -> Authority:
    """What a policy says of one touch. Empty ``allow`` and ``providers`` allow all; ``deny`` wins."""
    for name in touch.names:
        if name in deny:
            return Refused(f"toolsDeny names {name!r}")
    if allow and not any(name in allow for name in touch.names):
        return Refused(f"toolsAllow does not name {touch.names[0]!r}")
    if touch.provider and providers and touch.provider not in providers:
        return Refused(f"policy.providers does not name {touch.provider!r}")
    if mode == "always" and touch.kind != "pure":
        return Asked("approval: always")
    if mode == "mutations" and (touch.kind in MUTATIONS or touch.remote):
        return Asked(f"approval: mutations, and it is {touch.kind}")
    if mode == "high_risk" and touch.risk in HIGH_RISKS:
        return Asked(f"approval: high_risk, and its risk is {touch.risk}")
    if touch.approval == "always":
        return Asked("its own contract asks for approval")
    return Allowed()
