"""Which addresses a workflow may reach: judged before anything is sent, resolved once, and the connection is to that address.

A name that resolves to any private address is refused whole: an answer that changes between the check and the connection
changes nothing, because nobody asks again. Redirects are not followed, proxies are not used.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import msgspec

from perdure.definitions.workflow import Policy
from perdure.errors import Denied, Unavailable

Resolve = Callable[[str, int], Sequence[str]]
"""The addresses of a host name and port, as text."""

_PORTS = {"http": 80, "https": 443}
_EXTRA = tuple(
    ipaddress.ip_network(text)
    for text in (
        "100.64.0.0/10",
        "192.0.0.0/24",
        "198.18.0.0/15",
        "64:ff9b::/96",
        "2001:db8::/32",
        "2002::/16",
        "fec0::/10",
    )
)


class Target(msgspec.Struct, frozen=True):
    """Where a request goes: the name it is meant for and the address it is sent to."""

    scheme: str
    host: str
    port: int
    address: str
    path: str


def system_resolve(host: str, port: int) -> Sequence[str]:
    """The addresses the system gives for a name. Blocks.

    Raises:
        OSError: it has none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet: not private, local, shared, of documentation, or reserved."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    if mapped is not None:
        found = mapped
    if found.is_multicast or not found.is_global:
        return False
    return not any(found.version == net.version and found in net for net in _EXTRA)


def host_allowed(host: str, allowed: Sequence[str]) -> bool:
    """Whether a list names a host: exactly, or by ``*.suffix``, which is not the suffix itself."""
    name = host.lower().rstrip(".")
    for entry in allowed:
        wanted = entry.lower().rstrip(".")
        if name == wanted or (wanted.startswith("*.") and name.endswith(wanted[1:]) and name != wanted[2:]):
            return True
    return False


def judge(url: str, policy: Policy) -> Target:
    """What a policy says of an address, by its words; it is not resolved yet.

    Raises:
        Denied: it may not be reached.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Denied(f"{url[:200]!r} is no address: {error}.") from error
    network = policy.network
    if parts.scheme not in network.allowed_schemes:
        raise Denied(f"{url[:200]!r}: the scheme {parts.scheme!r} is not among allowedSchemes.")
    if parts.username is not None or parts.password is not None:
        raise Denied("The address holds a user name or a password.", help="Use a header with a secret reference.")
    host = parts.hostname or ""
    if not host or not host_allowed(host, policy.network_allowlist):
        raise Denied(f"networkAllowlist does not name {host!r}.", help="Add it to policy.networkAllowlist.")
    port = port or _PORTS[parts.scheme]
    if network.allowed_ports and port not in network.allowed_ports:
        raise Denied(f"Port {port} is not among allowedPorts.")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, port, "", path)


def resolve(target: Target, policy: Policy, resolver: Resolve = system_resolve) -> Target:
    """The target with the one address it is sent to. Blocks.

    Raises:
        Denied: one of its addresses may not be reached. Unavailable: it has none.
    """
    try:
        addresses = resolver(target.host, target.port)
    except OSError as error:
        raise Unavailable(f"The name {target.host!r} cannot be resolved: {error}.") from error
    if not addresses:
        raise Unavailable(f"The name {target.host!r} has no address.")
    private = [address for address in addresses if not is_public(address)]
    if private and not policy.network.allow_private:
        raise Denied(f"{target.host!r} resolves to {private[0]}, which is not of the open internet.",
                     help="Set policy.network.allowPrivate if that is meant.")  # fmt: skip
    return Target(target.scheme, target.host, target.port, addresses[0], target.path)
