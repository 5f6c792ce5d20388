"""Two nodes on one machine: network namespaces with a cable between them.

Each has its own addresses, ports and loopback; the file system is shared, as on a cluster. They
are within a user namespace of their own, so that root is not needed and nothing else is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUBNET = "10.77.0"


@dataclass(frozen=True)
class Node:
    """A network namespace, kept by a process that sleeps in it."""

    keeper: int
    address: str

    def enter(self, *command: str) -> tuple[str, ...]:
        """A command, on this node."""
        within = ("nsenter", "-t", str(self.keeper), "-U", "-n", "--preserve-credentials")
        return *within, *command

    def run(self, *command: str, **how: Any) -> None:
        """Run a command to its end; an error has what it said."""
        done = subprocess.run(
            self.enter(*command), capture_output=True, text=True, check=False, timeout=120, **how
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def start(self, *command: str, **how: Any) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(self.enter(*command), text=True, **how)

    def processes(self, words: str = "") -> dict[int, str]:
        """The processes of this node that have `words` in their command, but for the keeper."""
        here = os.readlink(f"/proc/{self.keeper}/ns/net")
        found = {}
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                if path.name.isdecimal() and os.readlink(path / "ns" / "net") == here:
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if words in command and int(path.name) != self.keeper:
                        found[int(path.name)] = command
        return found

    def kill(self) -> None:
        """As a cut of the power does: all of its processes at once, none has time to save."""
        until = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < until:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def missing() -> str:
    """Why there can be no such nodes here; empty where there can."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return "needs unshare, nsenter and ip"
    cable = "ip link add cable0 type veth peer name cable1"
    done = subprocess.run(("unshare", "-rn", "sh", "-c", cable), capture_output=True, check=False)
    return "" if done.returncode == 0 else "network namespaces cannot be made here"


@contextmanager
def two_nodes() -> Iterator[Sequence[Node]]:
    """Two nodes; at the end all their processes are killed."""
    keepers: list[subprocess.Popen[bytes]] = []
    made: list[Node] = []
    try:
        keepers.append(subprocess.Popen(("unshare", "-rn", "sleep", "infinity")))
        made.append(Node(keepers[0].pid, f"{SUBNET}.1"))
        _settled(keepers[0].pid, os.getpid())
        keepers.append(subprocess.Popen(made[0].enter("unshare", "-n", "sleep", "infinity")))
        made.append(Node(keepers[1].pid, f"{SUBNET}.2"))
        _settled(keepers[1].pid, os.getpid(), keepers[0].pid)
        made[0].run("ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
        made[0].run("ip", "link", "set", "cable1", "netns", str(made[1].keeper))
        for number, node in enumerate(made):
            node.run("ip", "address", "add", f"{node.address}/24", "dev", f"cable{number}")
            for device in ("lo", f"cable{number}"):
                node.run("ip", "link", "set", device, "up")
        yield made
    finally:
        for node in reversed(made):
            with suppress(OSError):
                node.kill()
        for keeper in reversed(keepers):
            keeper.kill()
            keeper.wait()


def _settled(pid: int, *others: int) -> None:
    """Wait until a process has a namespace of its own, and sleeps in it."""
    theirs = {os.readlink(f"/proc/{other}/ns/net") for other in others}
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with suppress(OSError):
            sleeps = Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"
            if sleeps and os.readlink(f"/proc/{pid}/ns/net") not in theirs:
                return
        time.sleep(0.02)
    raise AssertionError("a network namespace was not made in time")
