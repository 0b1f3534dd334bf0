"""How the ranks of one group, all on one host, come to share a segment: they tell, prove who they are, and connect.

1. Every rank tells the others, in one all-gather of the group itself, where it runs (host fingerprint, user, process)
   and a few random bytes. The group then decides, each rank alike, whether it is on one host.
2. Rank 0 has made the segment and listens on an abstract Unix socket of a random name. Each other rank connects; both
   sides look at the other's user id (SO_PEERCRED) and prove that they know the group's secret, made of everybody's
   random bytes. Then rank 0 hands over the segment and one end of a socket pair to each other rank.
3. One more all-gather tells whether it worked everywhere; if not, nobody uses it.

The socket pairs stay open. A byte through one wakes a peer that sleeps (a doorbell), and its end closes when the peer's
process does, however it dies. A forked child (a data worker) would keep that end open, so each process also watches
the others' pidfd, where it sees their process ids.

The fingerprint includes the network namespace: processes on either side of a (shaped) link are on different hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import platform
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from memwall_strategy.core.errors import MemwallError
from memwall_strategy.engine.peer_verdict import brief, has_ended, identity
from memwall_strategy.engine.shared_memory import create_sealed, why_not

_NOTE_BYTES = 1024
"""Length of what each rank tells; JSON, filled up with blanks."""
_HELLO_BYTES = 256
_MOST_DESCRIPTORS = 253
"""What one message can carry (the kernel's SCM_MAX_FD)."""
_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid."""
HANDSHAKE_S = 30.0
"""Longest time that the ranks of a group take to connect once they have told each other where they are."""
_STRANGER_S = 2.0
"""How long one that connected may take to say who it is."""


def fingerprint() -> str:
    """What processes have in common that may share memory: the boot of the machine and the network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


@dataclass
class Connection:
    """This rank's part of a group that shares a segment.

    Attributes:
        descriptor: of the segment; the caller maps it and closes it.
        doorbells: group rank -> socket to that rank.
        processes: group rank -> pidfd, for the ranks whose process can be seen.
    """

    descriptor: int
    doorbells: dict[int, socket.socket]
    processes: dict[int, int] = field(default_factory=dict)

    def ring(self) -> None:
        """Wake every peer that sleeps. Never blocks: a peer with a full socket has enough to wake it."""
        for doorbell in self.doorbells.values():
            with contextlib.suppress(OSError):  # full, or closed by either side: whoever waits will look
                doorbell.send(b"\0")

    def sleep(self, limit_s: float) -> None:
        """Sleep until a peer rings or dies, or the time is over."""
        poll = select.poll()
        doorbells = [doorbell for doorbell in self.doorbells.values() if doorbell.fileno() >= 0]
        for doorbell in doorbells:
            poll.register(doorbell, select.POLLIN)
        for descriptor in self.processes.values():
            poll.register(descriptor, select.POLLIN)
        poll.poll(limit_s * 1000)
        for doorbell in doorbells:
            with contextlib.suppress(OSError):  # nothing came, or closed by either side
                doorbell.recv(4096)

    def dead(self) -> list[int]:
        """Group ranks whose process has ended, or has closed its end. Never blocks."""
        poll = select.poll()
        ranks: dict[int, int] = {}
        for rank, doorbell in self.doorbells.items():
            poll.register(doorbell, 0)  # only that it was closed
            ranks[doorbell.fileno()] = rank
        for rank, descriptor in self.processes.items():
            poll.register(descriptor, select.POLLIN)
            ranks[descriptor] = rank
        return sorted({ranks[descriptor] for descriptor, _ in poll.poll(0)})

    def close(self) -> None:
        """Close the sockets; the peers see it. The segment lives as long as its mappings."""
        for doorbell in self.doorbells.values():
            doorbell.close()
        for descriptor in self.processes.values():
            os.close(descriptor)
        self.doorbells, self.processes = {}, {}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a group shares no memory."""

    reason: str
    """Completes "because ..."."""

    ordinary: bool
    """Nothing is wrong: it is on several hosts, or on a platform that has no such memory."""


def connect(group: dist.ProcessGroup, nbytes: int) -> Connection | Refusal:
    """Share a segment of ``nbytes`` between the ranks of ``group``. Collective: every rank of the group calls it.

    Returns:
        This rank's connection, or, the same on every rank, why there is none.

    Raises:
        MemwallError, RuntimeError: what the group's own collectives raise.
    """
    rank, world = group.rank(), group.size()
    offer = _Offer(nbytes, world) if rank == 0 else None
    try:
        mine = {"problem": "", "lacks": why_not(), "bytes": nbytes, "salt": secrets.token_hex(16), "uid": os.geteuid()}
        if not mine["lacks"]:
            mine |= {"host": fingerprint(), "node": platform.node()[:64], "process": identity()}
        if offer is not None:
            offer.open(mine)
        notes = _tell(group, mine)
        if (refusal := _objection(notes)) is not None:
            return refusal
        secret = hashlib.sha256("".join(note["salt"] for note in notes).encode()).digest()
        made, problem = None, ""
        try:
            made = offer.serve(secret) if offer is not None else _join(notes[0]["listener"], secret, rank)
            _watch(made.processes, notes, rank)
        except (OSError, MemwallError) as error:
            problem = brief(error)
        problems = ["nobody told how it went"]  # if the group fails: then nobody uses what was made
        try:
            problems = [note["problem"] for note in _tell(group, {"problem": problem})]
        finally:
            if made is not None and any(problems):
                os.close(made.descriptor)
                made.close()
        if not any(problems):
            return made
        return Refusal("; ".join(f"on rank {r} of the group {p}" for r, p in enumerate(problems) if p), ordinary=False)
    finally:
        if offer is not None:
            offer.close()


def _objection(notes: list[dict[str, Any]]) -> Refusal | None:
    """Why ranks that told this cannot share a segment; None where they can."""
    for rank, note in enumerate(notes):
        if note["lacks"]:
            return Refusal(f"on rank {rank} of the group {note['lacks']}", ordinary=True)
    if len({note["host"] for note in notes}) > 1:
        nodes = sorted({note["node"] for note in notes})
        where = f"hosts: {', '.join(nodes)}" if len(nodes) > 1 else f"network namespaces or hosts named {nodes[0]}"
        return Refusal(f"its ranks are on several {where}", ordinary=True)
    for rank, note in enumerate(notes):
        if note["problem"]:
            return Refusal(f"on rank {rank} of the group {note['problem']}", ordinary=False)
    if len({note["uid"] for note in notes}) > 1:
        return Refusal("its ranks run as several users", ordinary=False)
    if len({note["bytes"] for note in notes}) > 1:
        return Refusal("its ranks count different sizes of units", ordinary=False)
    return None


def _tell(group: dist.ProcessGroup, note: dict[str, Any]) -> list[dict[str, Any]]:
    """All-gather a small JSON object."""
    if isinstance(note.get("problem"), str):
        note["problem"] = note["problem"][:300]
    text = json.dumps(note).encode().ljust(_NOTE_BYTES)
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    return [json.loads(bytes(told.tolist())) for told in everyone]


class _Offer:
    """Rank 0's side: the segment, and the socket on which the others come for it."""

    def __init__(self, nbytes: int, world: int) -> None:
        self._nbytes, self._world = nbytes, world
        self._name = f"memwall-{secrets.token_hex(16)}"
        self._listener: socket.socket | None = None
        self._descriptor = -1
        self._pairs: dict[tuple[int, int], socket.socket] = {}

    def open(self, note: dict[str, Any]) -> None:
        """Make the segment and listen; what went wrong is told in ``note["problem"]``."""
        if note["lacks"]:
            return
        try:
            self._descriptor = create_sealed("memwall-window", self._nbytes)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(f"\0{self._name}")  # abstract: no file, and its own set for each network namespace
            self._listener.listen(self._world)
        except OSError as error:
            note["problem"] = f"no segment of {self._nbytes} bytes could be made: {error}"
        note["listener"] = self._name

    def serve(self, secret: bytes) -> Connection:
        """Hand the segment to every other rank, once it has proved who it is."""
        for a in range(self._world):
            for b in range(a + 1, self._world):
                self._pairs[a, b], self._pairs[b, a] = socket.socketpair()
        missing = set(range(1, self._world))
        deadline = time.monotonic() + HANDSHAKE_S
        while missing:
            self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                caller, _ = self._listener.accept()
            except TimeoutError as error:
                raise MemwallError(f"ranks {sorted(missing)} did not come for the segment") from error
            with caller:
                rank = self._recognize(caller, secret)
                if rank in missing:  # strangers are sent away without a word
                    ends = [self._pairs.pop((rank, peer)) for peer in range(self._world) if peer != rank]
                    sent = [self._descriptor, *(end.fileno() for end in ends)]
                    socket.send_fds(caller, [_proof(secret, "server", rank)], sent)
                    for end in ends:
                        end.close()
                    missing.discard(rank)
        doorbells = {peer: self._pairs.pop((0, peer)) for peer in range(1, self._world)}
        descriptor, self._descriptor = self._descriptor, -1
        return _connection(descriptor, doorbells)

    @staticmethod
    def _recognize(caller: socket.socket, secret: bytes) -> int | None:
        if _user_of(caller) != os.geteuid():
            return None
        caller.settimeout(_STRANGER_S)
        try:
            hello = json.loads(caller.recv(_HELLO_BYTES))
            rank, proof = int(hello["rank"]), str(hello["proof"])
        except (OSError, ValueError, KeyError, TypeError):  # silent, gone again, or not one of us
            return None
        return rank if hmac.compare_digest(proof, _proof(secret, "client", rank).decode()) else None

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        for end in self._pairs.values():
            end.close()


def _join(listener: str, secret: bytes, rank: int) -> Connection:
    """Come for the segment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.settimeout(HANDSHAKE_S)
        server.connect(f"\0{listener}")
        if _user_of(server) != os.geteuid():
            raise MemwallError("the process that offers the segment runs as another user")
        server.send(json.dumps({"rank": rank, "proof": _proof(secret, "client", rank).decode()}).encode())
        proof, descriptors, _, _ = socket.recv_fds(server, _HELLO_BYTES, _MOST_DESCRIPTORS)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # Python 3.11's recv_fds drops the flag that would do it
    ends = [socket.socket(fileno=descriptor) for descriptor in descriptors[1:]]
    if not descriptors or not hmac.compare_digest(proof, _proof(secret, "server", rank)):
        for descriptor in descriptors[:1]:
            os.close(descriptor)
        for end in ends:
            end.close()
        raise MemwallError("the process that offers the segment does not know the group's secret, or sent nothing")
    peers = [peer for peer in range(len(ends) + 1) if peer != rank]
    return _connection(descriptors[0], dict(zip(peers, ends, strict=True)))


def _connection(descriptor: int, doorbells: dict[int, socket.socket]) -> Connection:
    for doorbell in doorbells.values():
        doorbell.setblocking(False)
    return Connection(descriptor, doorbells)


def _proof(secret: bytes, side: str, rank: int) -> bytes:
    return hmac.new(secret, f"{side} {rank}".encode(), hashlib.sha256).hexdigest().encode()


def _user_of(peer: socket.socket) -> int:
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(packed)[1]


def _watch(found: dict[int, int], notes: Iterable[dict[str, Any]], rank: int) -> None:
    """Put into ``found`` a pidfd of each peer whose process id means the same here as there."""
    here = identity()["host"]
    for peer, note in enumerate(notes):
        process = note["process"]
        if peer == rank or not here or process["host"] != here:
            continue
        with contextlib.suppress(OSError):  # an old kernel, or a sandbox: the socket still tells
            descriptor = os.pidfd_open(process["pid"])
            if has_ended(process):  # and perhaps another one has its id since
                os.close(descriptor)
                raise MemwallError(f"rank {peer} of the group ended")
            found[peer] = descriptor
