"""A protocol client reaches the one address that was judged, whatever its SDK asks for, with both HTTP libraries."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from perdure.definitions.workflow import Network, Policy, SecretRef
from perdure.executors.network import Target
from perdure.ports.executor import Workspace
from perdure.protocols._wire import Sent, client, watching
from support.a2a_puppet import Peer

pytestmark = pytest.mark.anyio
LOCAL = Policy(network_allowlist=("clerk.test",), network=Network(allow_private=True))
LIBRARIES = pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])


def to(peer: Peer, library: Any, address: str = "127.0.0.1", **options: Any) -> Any:
    target = Target("http", "clerk.test", peer.port, address, "/")
    return client(library, target, LOCAL, Workspace(Path.cwd()), {"X-Own": "1"}, **options)


@LIBRARIES
async def test_a_name_leads_to_the_judged_address(library: Any) -> None:
    async with Peer() as peer, to(peer, library) as http:
        found = await http.get(f"http://clerk.test:{peer.port}/report")
        assert (found.status_code, found.content) == (200, b"bytes of /report")
        [head] = peer.heads
        for line in (b"host: clerk.test:", b"x-own: 1", b"accept-encoding: identity"):
            assert line in head.lower()


@LIBRARIES
async def test_an_address_of_version_6(library: Any) -> None:
    arrived: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(serve, "::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    async with server:
        peer = Peer()
        peer.port = server.sockets[0].getsockname()[1]
        async with to(peer, library, "::1") as http:
            assert (await http.get(f"http://clerk.test:{peer.port}/")).status_code == 204
    assert len(arrived) == 1


@LIBRARIES
@pytest.mark.parametrize(
    "url", ["http://other.test:PORT/", "http://127.0.0.1:PORT/", "http://clerk.test:1/", "https://clerk.test:PORT/"]
)
async def test_nothing_else_is_reached(url: str, library: Any) -> None:
    async with Peer() as peer, to(peer, library) as http:
        sent = Sent()
        token = watching.set(sent)
        with pytest.raises(library.ConnectError, match="is not http://clerk"):
            await http.get(url.replace("PORT", str(peer.port)))
        watching.reset(token)
        assert (peer.heads, sent.left, bool(sent.problem)) == ([], False, True)


@LIBRARIES
async def test_a_redirect_is_an_answer(library: Any) -> None:
    async with Peer(card="status:302 There|Location: http://clerk.test/") as peer, to(peer, library) as http:
        found = await http.get(f"http://clerk.test:{peer.port}/.well-known/agent-card.json")
        assert (found.status_code, len(peer.heads)) == (302, 1)


@LIBRARIES
async def test_what_is_known_of_a_message(library: Any) -> None:
    async with Peer(SendMessage="status:429 Slow|Retry-After: 3") as peer, to(peer, library) as http:
        at = f"http://clerk.test:{peer.port}/rpc"
        sent = Sent(b'"SendMessage"')
        token = watching.set(sent)
        await http.post(at, json={"id": 1, "method": "GetTask"})  # another message is not told of
        assert (sent.left, sent.status) == (False, 0)
        await http.post(at, json={"id": 1, "method": "SendMessage"})
        watching.reset(token)
        assert (sent.left, sent.status, sent.retry_after, sent.busy, sent.refused) == (True, 429, 3.0, True, True)


@pytest.mark.parametrize(("status", "refused"), [(200, False), (302, False), (307, True), (308, True), (400, True), (408, False),
                                                 (500, False), (502, False), (503, True), (504, False)])  # fmt: skip
def test_which_answers_say_that_nothing_was_done(status: int, refused: bool) -> None:
    assert Sent(status=status).refused is refused


@LIBRARIES
async def test_soft_a_lost_connection_is_an_answer(library: Any) -> None:
    async with Peer(GetTask="reset") as peer:
        at = f"http://clerk.test:{peer.port}/rpc"
        async with to(peer, library, soft=True) as http:
            assert (await http.post(at, json={"id": 1, "method": "GetTask"})).status_code == 502
        async with to(peer, library) as http:
            with pytest.raises(library.TransportError):
                await http.post(at, json={"id": 1, "method": "GetTask"})


def certificate(folder: Path, name: str) -> tuple[str, Path]:
    """A certificate that vouches for itself, and the file with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(Encoding.PEM).decode()
    file = folder / f"{name}.pem"
    file.write_text(pem + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode())
    return pem, file


@LIBRARIES
@pytest.mark.parametrize(("name", "trusted"), [("clerk.test", True), ("clerk.test", False), ("other.test", True)])
async def test_a_certificate_is_held_to_the_name_and_to_who_is_trusted(
    name: str, trusted: bool, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem, file = certificate(tmp_path, name)
    monkeypatch.setenv("CA", pem)
    rules = Network(allow_private=True, custom_ca=SecretRef(env="CA") if trusted else None)
    policy = Policy(network_allowlist=("clerk.test",), network=rules, environment_allowlist=("CA",))
    secure = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    secure.load_cert_chain(file)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=secure)
    async with server:
        port = server.sockets[0].getsockname()[1]
        target = Target("https", "clerk.test", port, "127.0.0.1", "/")
        sent = Sent()
        token = watching.set(sent)
        async with client(library, target, policy, Workspace(tmp_path), {}) as http:
            if (name, trusted) == ("clerk.test", True):
                assert (await http.get(f"https://clerk.test:{port}/")).status_code == 204
            else:
                with pytest.raises(library.ConnectError):
                    await http.get(f"https://clerk.test:{port}/")
        watching.reset(token)
        assert sent.left is (name == "clerk.test" and trusted)
