"""Secrets from the environment, a file and a program: read late, bounded, and shown by no error, repr or pickle."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure import limits, secrets
from perdure.definitions.context import Secret
from perdure.errors import Invalid

HUNTER = "hunter2-sentinel"


def script(tmp_path: Path, body: str) -> Path:
    """A program that runs ``body``."""
    program = tmp_path / "give-key"
    program.write_text(f"#!{sys.executable}\nimport os, signal, subprocess, sys, time\n{body}\n", encoding="utf-8")
    program.chmod(0o755)
    return program


def refusal(secret: Secret, *said: str) -> str:
    """What revealing it says; checked not to hold the sentinel, in the error or in any cause of it."""
    with pytest.raises(Invalid) as caught:
        secret.reveal()
    error: BaseException | None = caught.value
    told = "".join(traceback.format_exception(caught.value))
    while error is not None:
        told += repr(error) + repr(error.args) + repr(vars(error))
        error = error.__cause__ or error.__context__
    assert HUNTER not in told
    assert all(word in str(caught.value) for word in said), str(caught.value)
    return told


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "secret"),
    [
        ("a b", "a b"),
        ("a\n", "a"),
        ("a\r\n", "a"),
        ("a\r", "a\r"),
        ("a\n\n", "a\n"),
        ("\na", "\na"),
        ("k\u00fc\U0001f511", "k\u00fc\U0001f511"),
    ],
)
def test_a_file_is_read_without_one_newline(tmp_path: Path, held: str, secret: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(held.encode())
    assert Secret.file(path).reveal() == Secret.file(str(path)).reveal() == secret


def test_a_file_is_read_again_each_time_and_through_links(tmp_path: Path) -> None:
    path, link = tmp_path / "key", tmp_path / "link"
    link.symlink_to(path)
    secret = Secret.file(link)
    refusal(secret, "link", "No such file")
    for value in ("one", "two"):
        path.write_text(value, encoding="utf-8")
        assert secret.reveal() == value


def test_a_file_at_the_limit_and_one_byte_over(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"x" * limits.SECRET_FILE_BYTES_MAX)
    assert len(Secret.file(path).reveal()) == limits.SECRET_FILE_BYTES_MAX
    path.write_bytes(HUNTER.encode().ljust(limits.SECRET_FILE_BYTES_MAX + 1, b"x"))
    refusal(Secret.file(path), "more than the limit of 65,536 bytes", str(path))


@pytest.mark.parametrize(
    ("held", "said"), [(b"", "holds nothing"), (b"\n", "holds nothing"), (HUNTER.encode() + b"\xff", "no UTF-8")]
)
def test_a_file_that_holds_no_secret(tmp_path: Path, held: bytes, said: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(held)
    refusal(Secret.file(path), said, str(path))


def test_only_a_regular_file_is_read_and_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        refusal(Secret.file(place), "no regular file", str(place))


@pytest.mark.parametrize(
    ("mode", "fits"), [(0o400, True), (0o444, True), (0o660, True), (0o602, False), (0o666, False)]
)
def test_a_file_that_everybody_may_write_is_refused(tmp_path: Path, mode: int, fits: bool) -> None:
    path = tmp_path / "key"
    path.write_text(HUNTER, encoding="utf-8")
    path.chmod(mode)
    if fits:
        assert Secret.file(path).reveal() == HUNTER
    else:
        refusal(Secret.file(path), "written by everybody", "chmod o-w")


@pytest.mark.parametrize("path", ["", " ", "a\0b", f"{HUNTER}\n", None, 3])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(Invalid, match=r"Secret\.file") as caught:
        Secret.file(path)
    assert HUNTER not in str(caught.value)


# -- programs ----------------------------------------------------------------------------------------------------------


def test_a_program_gets_its_words_as_they_are_and_an_almost_empty_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BANK_TOKEN", HUNTER)
    monkeypatch.setenv("HOME", "/nowhere")
    program = script(
        tmp_path, "print(sys.argv[1:], sorted(os.environ), sys.stdin.read(), os.getpgid(0) == os.getpid())"
    )
    said = Secret.process(str(program), "$HOME; echo `id`", "*", "").reveal()
    assert said.startswith("['$HOME; echo `id`', '*', ''] ['HOME', ")
    assert "'PATH'" in said
    assert "BANK_TOKEN" not in said
    assert said.endswith(" True")


def test_a_program_is_found_on_the_path_and_started_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tmp_path / "count"
    script(tmp_path, f"open({str(count)!r}, 'a').write('x')\nprint(open({str(count)!r}).read())")
    monkeypatch.setenv("PATH", str(tmp_path))
    secret = Secret.process("give-key")
    assert not count.exists()
    assert [secret.reveal(), secret.reveal()] == ["x", "xx"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (f"print('{HUNTER}'); print('{HUNTER}', file=sys.stderr); sys.exit(3)", "exited with status 3"),
        (f"print('{HUNTER}', flush=True); os.kill(os.getpid(), signal.SIGTERM)", "ended by signal 15"),
        ("print()", "holds nothing"),
        ("pass", "holds nothing"),
        (f"sys.stdout.buffer.write(b'{HUNTER}\\xff')", "no UTF-8"),
        (f"print('{HUNTER}' + 'x' * 16_384)", "more than the limit of 16,384 bytes"),
        (f"while True: print('{HUNTER}' * 1000)", "more than the limit of 16,384 bytes"),
    ],
)
def test_a_program_that_gives_no_secret(
    tmp_path: Path, body: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    refusal(Secret.process(str(script(tmp_path, body)), HUNTER), "The secret process give-key", said)
    assert capfd.readouterr() == ("", "")


def test_output_at_the_limit(tmp_path: Path) -> None:
    program = script(tmp_path, f"sys.stdout.write('x' * {limits.SECRET_OUTPUT_BYTES_MAX})")
    assert len(Secret.process(str(program)).reveal()) == limits.SECRET_OUTPUT_BYTES_MAX


def test_programs_that_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("nothing", encoding="utf-8")
    refusal(
        Secret.process("no-such-program-anywhere", HUNTER), "no-such-program-anywhere cannot be started: No such file"
    )
    refusal(Secret.process(str(tmp_path / "text")), "The secret process text cannot be started: Permission denied")


@pytest.mark.parametrize(
    "body",
    [
        "time.sleep(600)",
        f"print('{HUNTER}', flush=True); time.sleep(600)",
        f"print('{HUNTER}', flush=True); os.close(1); time.sleep(600)",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
    ],
    ids=["silent", "told", "closed", "deaf"],
)
def test_a_program_that_does_not_end_is_killed(tmp_path: Path, body: str) -> None:
    mark = tmp_path / "pid"
    program = script(tmp_path, f"open({str(mark)!r}, 'w').write(str(os.getpid()))\n{body}")
    began = time.monotonic()
    refusal(Secret.process(str(program), timeout="1s"), "give-key did not end within 1 s and was killed")
    assert time.monotonic() - began < 10
    assert gone(int(mark.read_text(encoding="utf-8")))


def test_what_it_started_is_killed_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    inner = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    program = script(
        tmp_path,
        f"subprocess.Popen([sys.executable, '-c', {inner!r}])\nwhile not os.path.exists({str(mark)!r}): time.sleep(0.01)",
    )
    refusal(Secret.process(str(program), timeout="2s"), "did not end within 2 s")  # it still holds the output
    assert gone(int(mark.read_text(encoding="utf-8")))


def gone(pid: int) -> bool:
    """Whether a process ends soon: whoever inherits it may take a moment to reap it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_an_interrupted_read_leaves_nothing_running(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    program = script(tmp_path, f"open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    asking = f"import perdure as p; p.Secret.process({str(program)!r}, timeout='60s').reveal()"
    with subprocess.Popen([sys.executable, "-c", asking], stderr=subprocess.PIPE) as asker:
        deadline = time.monotonic() + 30
        while not (mark.exists() and mark.read_text(encoding="utf-8")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        asker.send_signal(signal.SIGINT)
        _, told = asker.communicate(timeout=30)
    assert b"KeyboardInterrupt" in told
    assert gone(int(mark.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Secret.process(""), "a program"),
        (lambda: Secret.process("x", 3), "text"),  # type: ignore[arg-type]
        (lambda: Secret.process("x", f"{HUNTER}\0"), "NUL"),
        (lambda: Secret.process("x", HUNTER.ljust(4097, "x")), "4,096"),
        (lambda: Secret.process("x", *[HUNTER] * 65), "65 arguments; the limit is 64"),
        (lambda: Secret.process("x", timeout="61s"), "the limit is 60 s"),
        (lambda: Secret.process("x", timeout=0), "timeout"),
        (lambda: Secret.process("x", timeout="soon"), "timeout"),
    ],
)
def test_processes_that_cannot_be(make: Callable[[], Secret], said: str) -> None:
    with pytest.raises(Invalid) as caught:
        make()
    assert said in str(caught.value)
    assert HUNTER not in str(caught.value)


def test_the_most_words_fit() -> None:
    assert repr(Secret.process("true", *["x" * 4096] * 64)) == "Secret(process:true)"


# -- all of them -------------------------------------------------------------------------------------------------------


def every(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Secret]:
    monkeypatch.setenv("BANK_TOKEN", HUNTER)
    (tmp_path / "key").write_text(HUNTER, encoding="utf-8")
    program = script(tmp_path, f"print('{HUNTER}')")
    return {
        "Secret(env:BANK_TOKEN)": Secret.env("BANK_TOKEN"),
        f"Secret(file:{tmp_path / 'key'})": Secret.file(tmp_path / "key"),
        "Secret(process:give-key)": Secret.process(str(program), "--of", "bank"),
    }


def test_they_show_their_place_and_never_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, secret in every(tmp_path, monkeypatch).items():
        assert secret.reveal() == HUNTER
        for shown in (
            repr(secret),
            str(secret),
            f"{secret}",
            f"{secret:>90}",
            f"{secret!r}",
            f"{[secret]}",
            "".join(map(str, [secret])),
        ):
            assert name in shown
            assert HUNTER not in shown
        assert "bank" not in repr(secret)  # an argument may say more than is to be shown
        assert not hasattr(secret, "__dict__")
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            try:
                raw = pickle.dumps(secret, protocol)
            except TypeError:  # the old protocols cannot hold it
                continue
            assert HUNTER.encode() not in raw
            assert pickle.loads(raw) == secret


def test_equal_places_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets_ = every(tmp_path, monkeypatch)
    again = every(tmp_path, monkeypatch)
    assert list(secrets_.values()) == list(again.values())
    assert len({*secrets_.values(), *again.values()}) == 3
    assert all(copy.deepcopy(one) == copy.copy(one) == one for one in secrets_.values())
    assert Secret.process("a", "b", timeout=1) == Secret.process("a", "b", timeout=2) != Secret.process("a", "c")
    assert Secret.env("a") != Secret.file("a") != Secret.process("a") != "a"
    assert [one.blocks for one in secrets_.values()] == [False, True, True]


def test_a_definition_that_holds_one_has_a_digest_that_tells_the_place_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for secret in every(tmp_path, monkeypatch).values():

        @p.tool
        def charge(cents: int, token: p.Secret = secret) -> str:
            return "charged"

        agent = p.Agent("clerk", tools=[charge])
        assert agent.digest == p.Agent("clerk", tools=[charge]).digest
        assert charge.secrets == {"token"}
        assert "token" not in charge.parameters()["properties"]


def test_a_process_does_not_hold_up_the_loop_in_a_thread(tmp_path: Path) -> None:
    secret = Secret.process(str(script(tmp_path, f"time.sleep(0.5); print('{HUNTER}')")))

    async def both() -> tuple[str, int]:
        reading = asyncio.create_task(asyncio.to_thread(secret.reveal))
        beats = 0
        while not reading.done():
            await asyncio.sleep(0.01)
            beats += 1
        return reading.result(), beats

    value, beats = asyncio.run(both())
    assert value == HUNTER
    assert beats > 5


def test_the_sources_do_not_show_their_arguments() -> None:
    assert HUNTER not in repr(secrets.Process(("a", HUNTER), 1.0))
