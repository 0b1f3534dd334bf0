"""Lightning's own subprocess launcher, as users start it: a script that asks for two devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lightning.models import assert_close, make_net, train_plain
from tests.ranks import ROOT

_TIMEOUT_S = 120.0

TRAINER = """
import json, pathlib, sys, warnings
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

module.train_dataloader = loader  # made in each process, when its rank is known
trainer.fit(module)
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


@pytest.mark.parametrize(
    ("script", "package", "namespace"),
    [
        (TRAINER, "lightning.pytorch", "lightning"),
        (TRAINER, "pytorch_lightning", "pytorch_lightning"),
        (FABRIC, "lightning.fabric", ""),
    ],
)
def test_a_script_on_two_devices(tmp_path: Path, script: str, package: str, namespace: str) -> None:
    """The launcher starts the second rank, both train to the plain loop's losses, and nothing is left."""
    path = tmp_path / "script.py"
    path.write_text(script.format(package=package, namespace=namespace))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, str(path), str(tmp_path)], env=env, cwd=tmp_path, capture_output=True, text=True,
        timeout=_TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    wanted = train_plain(make_net("gpt"), "gpt", steps=10, micro=4, accumulate=2)
    assert_close([(a + b) / 2 for a, b in zip(*ranks, strict=True)], wanted)
