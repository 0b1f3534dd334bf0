"""Rate-limited links between processes of this machine: network namespaces joined through a bridge, shaped by ``tc``.

Needs root (Linux). Every name is made from this process's id, so that two benches do not meet, and everything is taken
down at the end, also after an exception. All addresses stay on this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_BURST = "256kb"
_LATENCY = "50ms"
_PREFIX = "10.99"


@dataclass(frozen=True)
class Host:
    """One namespace: a host of its own for whoever runs in it.

    Attributes:
        name: of the namespace.
        address: its IPv4 address.
        interface: its one network interface besides loopback.
    """

    name: str
    address: str
    interface: str

    def command(self, *command: str) -> list[str]:
        """The command, run in this namespace."""
        return ["ip", "netns", "exec", self.name, *command]


def why_not() -> str | None:
    """The reason why namespaces cannot be made here; None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is missing (Debian package iproute2)"
    name = f"mwprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"ip netns add is refused: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return None


@contextlib.contextmanager
def linked_hosts(count: int, rate: str) -> Iterator[list[Host]]:
    """``count`` namespaces on one bridge; each sends at most ``rate`` (tc's words, e.g. ``400mbit``)."""
    tag = f"{os.getpid() % 100000:05d}"
    subnet = os.getpid() % 250
    bridge = f"mwb{tag}"
    hosts = [Host(f"mw{tag}n{i}", f"{_PREFIX}.{subnet}.{i + 1}", f"mwi{tag}{i}") for i in range(count)]
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for i, host in enumerate(hosts):
            outer = f"mwo{tag}{i}"
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", host.interface, "netns", host.name)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _run("ip", "-n", host.name, "link", "set", host.interface, "up")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            _run("tc", "-n", host.name, "qdisc", "add", "dev", host.interface, "root", "tbf",
                 "rate", rate, "burst", _BURST, "latency", _LATENCY)  # fmt: skip
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
