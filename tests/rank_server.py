"""Starts ranks by forking a process that has torch and Lightning imported already.

Importing them takes a rank several seconds of CPU, most of a short test's time. The server imports once, stays on one
thread (so forking is safe), and forks a rank for each request. Requests and replies are JSON lines on its standard
input and output; when its input ends, it ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

_IMPORT_LIMIT_S = 300.0


class Rank:
    """A forked rank; the part of ``subprocess.Popen`` that the tests use."""

    def __init__(self, server: RankServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self.returncode = self._server.request({"do": "wait", "pid": self.pid})["code"]
        return self.returncode


class RankServer:
    """The pytest process's end of the server; one for a session, started by the first test that needs ranks."""

    def __init__(self, command: list[str], env: dict[str, str], cwd: str) -> None:
        self._process = subprocess.Popen(
            command, env=env, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ended: dict[int, int] = {}

    def spawn(self, module: str, worker: str, arguments: str, result: str, log: str, env: dict[str, str]) -> Rank:
        """Fork one rank."""
        job = {"module": module, "worker": worker, "arguments": arguments, "result": result, "log": log, "env": env}
        return Rank(self, self.request({"do": "spawn", "job": job})["pid"])

    def exit_code(self, pid: int) -> int | None:
        """Exit code of a rank, negative for a signal; None while it runs."""
        if pid not in self._ended:
            self._ended |= {int(p): code for p, code in self.request({"do": "poll"})["ended"].items()}
        return self._ended.get(pid)

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """One request, one reply; the first waits for the server's imports."""
        timer = threading.Timer(_IMPORT_LIMIT_S, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not reply:
            raise RuntimeError(f"the rank server ended with code {self._process.poll()}")
        return json.loads(reply)

    def stop(self) -> None:
        """End the server."""
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def _serve() -> dict[str, Any] | None:
    """Answer requests; in a forked rank, return its job."""
    ended: dict[int, int] = {}
    running: set[int] = set()

    def reap(pid: int, flags: int) -> None:
        found, status = os.waitpid(pid, flags)
        if found:
            running.discard(found)
            ended[found] = os.waitstatus_to_exitcode(status)

    for line in sys.stdin:
        message = json.loads(line)
        match message["do"]:
            case "spawn":
                assert len(os.listdir("/proc/self/task")) == 1, "a second thread: forking is not safe any more"
                pid = os.fork()
                if pid == 0:
                    return message["job"]
                running.add(pid)
                reply: dict[str, Any] = {"pid": pid}
            case "poll":
                for pid in list(running):
                    reap(pid, os.WNOHANG)
                reply = {"ended": ended}
            case "wait":
                if message["pid"] in running:
                    reap(message["pid"], 0)
                reply = {"code": ended[message["pid"]]}
            case other:
                raise ValueError(other)
        print(json.dumps(reply), flush=True)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def _become(job: dict[str, Any]) -> None:
    os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv = [job["worker"]]
    faulthandler.enable()  # a crash in C++ shows its Python threads in the log


def main() -> None:
    """Import what every rank imports, serve, and in each fork run one rank."""
    import lightning  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401

    import memwall_strategy.lightning  # noqa: F401
    from tests.ranks import run_worker

    gc.collect()
    gc.freeze()  # a rank that ends need not look through all that was imported: that took a second each

    job = _serve()
    if job is not None:
        _become(job)
        run_worker(job["module"], job["worker"], job["arguments"], job["result"])


if __name__ == "__main__":
    main()
