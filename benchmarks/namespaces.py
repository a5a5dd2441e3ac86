"""Two hosts on one machine: two network namespaces, joined by a veth pair whose rate can be limited. Linux, root.

Each namespace has its own loopback, so ranks of one "host" talk fast and ranks of two talk through the link. A guard
process takes everything down when this process ends, however it ends: it waits for the end of a pipe that only this
process holds open. Names carry our process id, so what a killed guard left behind is found and removed by the next run.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "switchyard-hosts"
ADDRESSES = ("10.99.0.1", "10.99.0.2")
INTERFACE = "link0"
_WINDOW_BYTES = 131072

# Reads its standard input to the end, that is until whoever holds the other end is gone. Kills only what runs in the
# namespaces given as arguments, then deletes them; the veth pair goes with them.
_GUARD = """
trap '' INT TERM HUP
cat > /dev/null
for name in "$@"; do
    for turn in 1 2 3; do ip netns pids "$name" 2>/dev/null | xargs -r kill -9 2>/dev/null; done
    ip netns del "$name" 2>/dev/null
done
"""


class CannotBuildError(Exception):
    """Namespaces cannot be made here; the text says why."""


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """The namespaces, by name."""

    names: tuple[str, str]

    def set_rate(self, mbit: int | None) -> None:
        """Limit the link to so many Mbit/s each way; None: as fast as the machine is."""
        for name in self.names:
            tc = ["tc", "-n", name, "qdisc"]
            subprocess.run([*tc, "del", "dev", INTERFACE, "root"], capture_output=True, check=False)
            if mbit is not None:
                limit = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms"]
                _run([*tc, "add", "dev", INTERFACE, "root", *limit])

    def sent_bytes(self) -> int:
        """Bytes that have crossed the link so far, both ways, as the kernel counts them (headers included)."""
        total = 0
        for name in self.names:
            path = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
            total += int(_run(["ip", "netns", "exec", name, "cat", path]))
        return total

    def start(
        self, host: int, command: Sequence[str], env: Mapping[str, str], **popen: object
    ) -> subprocess.Popen[str]:
        """Start a process on a host."""
        return subprocess.Popen(  # type: ignore[call-overload]
            ["ip", "netns", "exec", self.names[host], *command], env=dict(env), text=True, **popen
        )


def why_not() -> str | None:
    """Why namespaces cannot be made here, or None when they probably can."""
    if not Path("/proc/self/ns/net").exists():
        return "network namespaces are a feature of Linux"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    return None


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make both hosts and their link; take them down at the end of the block, of the process, or of the guard's patience.

    Raises CannotBuildError.
    """
    if reason := why_not():
        raise CannotBuildError(reason)
    remove_leftovers()
    first, second = (f"{PREFIX}-{os.getpid()}-{letter}" for letter in "ab")
    guard = subprocess.Popen(
        ["sh", "-c", _GUARD, "guard", first, second],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _build(first, second)
        yield TwoHosts((first, second))
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait(30)


def remove_leftovers() -> list[str]:
    """Delete namespaces of runs whose process is gone. Returns their names."""
    removed = []
    for name in existing():
        pid = name.removeprefix(f"{PREFIX}-").split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            for inside in _run(["ip", "netns", "pids", name]).split():
                subprocess.run(["kill", "-9", inside], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            removed.append(name)
    return removed


def existing() -> list[str]:
    """Names of all namespaces that some run of ours made."""
    names = (line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.split())
    return [name for name in names if name.startswith(f"{PREFIX}-")]


def _build(first: str, second: str) -> None:
    try:
        for name in (first, second):
            _run(["ip", "netns", "add", name])
        _run(["ip", "-n", first, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second])
        for name, address in zip((first, second), ADDRESSES, strict=True):
            _run(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE])
            for device in ("lo", INTERFACE):
                _run(["ip", "-n", name, "link", "set", device, "up"])
            # Small windows, so that bulk never queues for long or is dropped, and gloo's word that a receiver is ready does
            # not wait behind it: with the usual windows every large exchange took a tenth of a second more at 100 Mbit/s.
            for buffer in ("tcp_rmem", "tcp_wmem"):
                command = f"echo 4096 {_WINDOW_BYTES} {_WINDOW_BYTES} > /proc/sys/net/ipv4/{buffer}"
                _run(["ip", "netns", "exec", name, "sh", "-c", command])
        # Tried once here, so that a kernel without the token bucket is noticed before anything is measured.
        TwoHosts((first, second)).set_rate(1000)
    except subprocess.CalledProcessError as error:
        raise CannotBuildError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout
