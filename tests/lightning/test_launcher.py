"""Lightning's own subprocess launcher, as users start it: a script that asks for two devices."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from memwall_strategy.engine.capacity import machine_cores
from tests.lightning.models import assert_close, make_net, train_plain
from tests.ranks import ROOT

_TIMEOUT_S = 120.0
_END_S = 40.0
"""A few seconds suffice: for the named error of the lost peer, and for Python to end."""

TRAINER = """
import json, os, pathlib, signal, sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
import {package} as L
import memwall_strategy.lightning
from tests.lightning.models import make_data, make_module
from torch.utils.data import DataLoader, TensorDataset

module = make_module("gpt", "{namespace}")
trainer = L.Trainer(strategy="memwall", accelerator="cpu", devices=2, max_epochs=1, accumulate_grad_batches=2,
                    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                    use_distributed_sampler=False)

def loader():
    mine = [tensor[trainer.global_rank::2] for tensor in make_data("gpt", 10 * 2 * 4)]
    return DataLoader(TensorDataset(*mine), batch_size=2)

def kill(batch, batch_idx):
    if trainer.global_rank == {killed} and batch_idx == 5:
        pathlib.Path(sys.argv[1], "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

module.train_dataloader = loader  # made in each process, when its rank is known
module.on_train_batch_start = kill
trainer.fit(module)
assert os.environ["LOCAL_WORLD_SIZE"] == "2" and os.environ["OMP_NUM_THREADS"] == os.environ["EXPECTED_THREADS"]
pathlib.Path(sys.argv[1], f"{{trainer.global_rank}}.json").write_text(json.dumps(module.losses))
"""

FABRIC = """
import json, pathlib, sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from {package} import Fabric
import memwall_strategy.lightning
from tests.lightning.models import loss_of, make_loader, make_net, make_optimizer

fabric = Fabric(strategy="memwall", accelerator="cpu", devices=2)
fabric.launch()
net = make_net("gpt")
model, optimizer = fabric.setup(net, make_optimizer(net.parameters()))
losses = []
for index, batch in enumerate(make_loader("gpt", 10 * 2 * 4, 2, rank=fabric.global_rank, world=2)):
    with fabric.no_backward_sync(model, enabled=index % 2 == 0):
        loss = loss_of(model, batch)
        fabric.backward(loss / 2)
    losses.append(loss.item())
    if index % 2:
        optimizer.step()
        optimizer.zero_grad()
pathlib.Path(sys.argv[1], f"{{fabric.global_rank}}.json").write_text(json.dumps(losses))
"""


SCRIPTS = {
    "lightning": TRAINER.format(package="lightning.pytorch", namespace="lightning", killed=None),
    "pytorch_lightning": TRAINER.format(package="pytorch_lightning", namespace="pytorch_lightning", killed=None),
    "fabric": FABRIC.format(package="lightning.fabric"),
    "killed": TRAINER.format(package="lightning.pytorch", namespace="lightning", killed=0),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen, Path]]]:
    """All scripts at once: most of their time goes into imports, on one core each."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):  # nobody chose: each rank gets its share of the machine
        env.pop(name, None)
    env["EXPECTED_THREADS"] = str(max(1, int(machine_cores() / 2)))
    running = {}
    for name, text in SCRIPTS.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "script.py").write_text(text)
        with (folder / "log").open("w") as log:
            running[name] = (
                subprocess.Popen(
                    [sys.executable, "script.py", "."], env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True,
                ),
                folder,
            )  # fmt: skip
    yield running
    for process, _ in running.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning", "fabric"])
def test_a_script_on_two_devices(started: dict[str, tuple[subprocess.Popen, Path]], name: str) -> None:
    """The launcher starts the second rank, and both train to the plain loop's losses; each knows of the other (CASES
    11: threads and memory of the machine are shared)."""
    process, folder = started[name]
    code = process.wait(_TIMEOUT_S)
    assert code == 0, (folder / "log").read_text()[-8000:]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    wanted = train_plain(make_net("gpt"), "gpt", steps=10, micro=4, accumulate=2)
    assert_close([(a + b) / 2 for a, b in zip(*ranks, strict=True)], wanted)


def test_the_launched_rank_ends_when_the_launching_one_is_killed(
    started: dict[str, tuple[subprocess.Popen, Path]],
) -> None:
    """Nobody is left to end it, so it ends itself."""
    process, folder = started["killed"]
    assert process.wait(_TIMEOUT_S) == -signal.SIGKILL, (folder / "log").read_text()[-8000:]
    assert (folder / "killed").exists()
    deadline = time.monotonic() + _END_S
    while (left := _processes_in(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, (folder / "log").read_text()[-8000:]


def _processes_in(session: int) -> list[psutil.Process]:
    """Living processes of a session."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
