"""Ranks that end with the process that started them, also when it died before they could ask for that."""

from __future__ import annotations

import os
import subprocess
import sys

from memwall_strategy.engine.processes import parent_is_gone

_ORPHAN = """
import os, subprocess, sys
child = '''
import os, sys, time
from memwall_strategy.engine.processes import parent_is_gone
started_by = int(sys.argv[1])
before = parent_is_gone(started_by)
print("ready", file=sys.stderr, flush=True)
sys.stdin.read()  # ends with the parent
deadline = time.monotonic() + 20
while os.getppid() == started_by and time.monotonic() < deadline:
    time.sleep(0.01)
print(before, parent_is_gone(started_by), flush=True)
'''
made = subprocess.Popen(
    [sys.executable, "-c", child, str(os.getpid())], stdin=subprocess.PIPE, stderr=subprocess.PIPE
)
made.stderr.readline()
"""


def test_an_orphan_knows() -> None:
    """The middle process ends at once; what it started outlives it and says what it sees."""
    done = subprocess.run([sys.executable, "-c", _ORPHAN], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_who_has_a_parent_is_no_orphan() -> None:
    assert not parent_is_gone(os.getppid())
    assert not parent_is_gone()
