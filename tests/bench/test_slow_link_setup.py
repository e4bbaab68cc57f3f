"""The namespaces of bench.slow_link: made, slowed down, and gone afterwards, whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import slow_link
from bench.slow_link import Link

ROOT = Path(__file__).parents[2]


def why_not() -> str:
    """Why namespaces cannot be made here, if they cannot."""
    if os.geteuid():
        return "namespaces need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "namespaces need iproute2: scripts/debian.sh iproute2"
    name = f"undertow-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return f"no namespaces: {made.stderr.strip()}" if made.returncode else ""


@pytest.fixture(scope="module")
def _namespaces() -> None:
    if why := why_not():
        pytest.skip(why)


needs_namespaces = pytest.mark.usefixtures("_namespaces")


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def there(names: tuple[str, ...]) -> list[str]:
    """Those of the namespaces that exist."""
    listed = {line.split()[0] for line in said("ip", "netns", "list").splitlines() if line}
    return [name for name in names if name in listed]


# -- with the rights -------------------------------------------------------------------------------


@needs_namespaces
def test_two_namespaces_see_each_other_at_the_rate_that_was_set() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with slow_link.slow_link() as link:
        assert there(link.names) == list(link.names)
        link.set_rate(50e6)
        link.set_rate(100e6)  # a rate can be changed
        for rank, name in enumerate(link.names):
            inside = link.place(rank)
            assert "rate 100Mbit" in said(*inside.before, "tc", "qdisc", "show")
            addresses = said("ip", "-n", name, "-o", "-4", "addr", "show")
            assert f"{slow_link._ADDRESSES[rank]}/24" in addresses
            assert inside.environment["GLOO_SOCKET_IFNAME"] in addresses
        hello = "import socket; socket.create_connection(('10.231.77.1', 29), 5).sendall(b'hello')"
        listen = (
            "import socket; s = socket.create_server(('10.231.77.1', 29)); print(flush=True);"
            "print(s.accept()[0].recv(9))"
        )
        first, second = (link.place(rank).before for rank in range(2))
        with subprocess.Popen(
            [*first, sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            server.stdout.readline()  # it listens
            said(*second, sys.executable, "-c", hello)
            assert server.stdout.readline() == "b'hello'\n"
    assert there(link.names) == []
    assert signal.getsignal(signal.SIGTERM) == before


@needs_namespaces
def test_they_are_gone_after_a_failure() -> None:
    names: tuple[str, ...] = ()

    def fail() -> None:
        nonlocal names
        with slow_link.slow_link() as link:
            names = link.names
            assert there(names)
            raise ValueError("a variant failed")

    with pytest.raises(ValueError, match="a variant failed"):
        fail()
    assert len(names) == 2
    assert there(names) == []


@needs_namespaces
def test_what_was_made_before_making_failed_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []

    def half(link: Link) -> None:
        made.append(link.names)
        slow_link._run("ip", "netns", "add", link.names[0])
        slow_link._run("ip", "netns", "add", link.names[0])  # it exists by now

    monkeypatch.setattr(Link, "make", half)
    with pytest.raises(SystemExit, match=r"error: ip netns add .* failed: .*exists"):
        slow_link.slow_link().__enter__()
    assert there(made[0]) == []


@needs_namespaces
@pytest.mark.slow
def test_they_are_gone_after_sigterm() -> None:
    code = (
        "import time\n"
        "from bench.slow_link import slow_link\n"
        "with slow_link() as link:\n"
        "    print(*link.names, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        names = tuple(process.stdout.readline().split())
        assert len(names) == 2
        assert there(names) == list(names)
        process.terminate()
        assert process.wait(30) == 143
    assert there(names) == []


# -- without them ----------------------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for PATH; its `ip` notes what it is asked to do, and fails."""
    tool = tmp_path / "ip"
    tool.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\necho "$SAYS" >&2\nexit 1\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "says",
    [
        "mkdir /run/netns failed: Permission denied",
        "mount --make-shared /run/netns failed: Operation not permitted",
    ],
)
def test_where_rights_are_missing_it_says_what_to_do(
    tools: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    monkeypatch.setenv("SAYS", says)
    with pytest.raises(SystemExit) as caught:
        slow_link.slow_link().__enter__()
    message = str(caught.value)  # printed on stderr, and the exit code is 1
    assert message.startswith("error: ip netns add undertow-")
    assert message.endswith(f"{says}; this benchmark makes network namespaces: run it as root")
    asked = (tools / "asked").read_text().splitlines()
    assert [line.split()[1] for line in asked] == ["add", "delete", "delete"]


def test_without_iproute2_it_says_what_to_install(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tools / "ip").unlink()
    with pytest.raises(SystemExit, match=r"ip is missing; install it: scripts/debian.sh iproute2"):
        slow_link.slow_link().__enter__()


def test_without_root_the_benchmark_is_skipped_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make bench` runs one after another, and ends with the first that fails."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["slow_link"])
    slow_link.main()
    assert (
        "skipped: this benchmark makes network namespaces; run it as root"
        in capsys.readouterr().out
    )
