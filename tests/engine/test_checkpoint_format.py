"""What stands in the files, and who else reads them: DCP, torch, Lightning's layout, safetensors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.engine.checkpoint.contents import collect
from memwall_strategy.engine.checkpoint.load import load_state, open_folder
from memwall_strategy.engine.checkpoint.storage import BlockReader
from memwall_strategy.runtime.checkpoint import Checkpointer, consolidate, model_state
from tests.engine.test_checkpoint_state import Net, build, take_steps


def test_plain_dcp_reads_what_we_write(tmp_path):
    model, optimizer = build("AdamW")
    take_steps(model, optimizer, 1)
    Checkpointer(model, [optimizer]).save(tmp_path / "c", {"epoch": 3})
    weights = {"state_dict": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    dcp.load(weights, checkpoint_id=tmp_path / "c")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in weights["state_dict"].items())
    dcp_to_torch_save(tmp_path / "c", tmp_path / "torch.pt")
    whole = torch.load(tmp_path / "torch.pt")
    moment = whole["optimizer_0"]["state"]["first.weight"]["exp_avg"]
    assert torch.equal(moment, optimizer.state[model.first.weight]["exp_avg"])
    assert torch.load(tmp_path / "c" / "meta.pt", weights_only=True) == {"epoch": 3}


def test_we_read_what_plain_dcp_wrote_in_our_layout(tmp_path):
    model = Net()
    Checkpointer(model).save(tmp_path / "c")
    contents = collect(model, None)
    other = {key: value + 1 for key, value in contents.blocks.items()}
    for file in ("__0_0.distcp", ".metadata", "memwall.json"):
        (tmp_path / "c" / file).unlink()
    dcp.save(other, checkpoint_id=tmp_path / "c")
    load_state(open_folder(tmp_path / "c", weights_only=True), model, [])
    assert torch.equal(model.first.weight, other["state_dict.first.weight"])


def test_an_index_that_could_execute_is_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(CheckpointError, match=r"builtins\.print"):
        BlockReader(tmp_path).read_metadata()


def test_every_payload_loads_with_weights_only(tmp_path):
    model, optimizer = build("LBFGS")
    take_steps(model, optimizer, 2)
    checkpointer = Checkpointer(model, [optimizer])
    checkpointer.save(tmp_path / "c")
    checkpointer.save_full(tmp_path / "f")
    for file in ("c/layout.pt", "c/meta.pt", "c/rng.pt", "f"):
        torch.load(tmp_path / file, weights_only=True)


def test_an_untrusted_class_is_explained(tmp_path):
    model = Net()
    Checkpointer(model).save(tmp_path / "c", {"odd": pickle.PickleError})
    with pytest.raises(CheckpointError, match=r"pickle\.PickleError.*weights_only=False"):
        Checkpointer(model).load(tmp_path / "c")
    extra = Checkpointer(model).load(tmp_path / "c", weights_only=False)
    assert extra == {"odd": pickle.PickleError}


def test_an_ordinary_checkpoint_of_any_strategy_loads(tmp_path):
    model, optimizer = build("AdamW")
    take_steps(model, optimizer, 2)
    ordinary = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 1}
    torch.save(ordinary, tmp_path / "lightning.ckpt")
    expected = take_steps(model, optimizer, 2, start=2)
    again, resumed = build("AdamW", seed=1)
    assert Checkpointer(again, [resumed]).load(tmp_path / "lightning.ckpt") == {"epoch": 1}
    assert take_steps(again, resumed, 2, start=2) == expected


def test_full_files_load_into_a_plain_model_and_optimizer(tmp_path):
    model, optimizer = build("AdamW")
    model.second_again = model.second  # tied: an ordinary file names both
    take_steps(model, optimizer, 2)
    Checkpointer(model, [optimizer]).save_full(tmp_path / "f.ckpt", {"epoch": 1}, 2)
    expected = take_steps(model, optimizer, 2, start=2)
    again, resumed = build("AdamW", seed=1)
    again.second_again = again.second
    file = torch.load(tmp_path / "f.ckpt", weights_only=True)
    again.load_state_dict(file["state_dict"], strict=True)
    resumed.load_state_dict(file["optimizer_states"][0])
    assert file["epoch"] == 1 and file["memwall"]["step"] == 2
    assert take_steps(again, resumed, 2, start=2) == expected


def test_safetensors_as_the_library_reads_them(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = Net().to(torch.bfloat16)
    model.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
    model.wide = nn.Parameter(torch.randn(3, 1, dtype=torch.float64))
    model.empty = nn.Parameter(torch.empty(0, 2))
    model.twin = nn.Linear(7, 3)
    model.twin.weight = model.second.weight
    Checkpointer(model).export_safetensors(tmp_path / "a.safetensors")
    Checkpointer(model).save(tmp_path / "c")
    consolidate(tmp_path / "c", tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    loaded = safetensors.load_file(tmp_path / "a.safetensors")
    assert set(loaded) == set(model_state(model))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.items())
    again = copy.deepcopy(model)
    again.second.weight.data.zero_()
    safetensors.load_model(again, tmp_path / "a.safetensors")
    assert torch.equal(again.second.weight, model.second.weight)
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "twin.weight": "second.weight"}


def test_a_type_that_safetensors_lacks_is_named(tmp_path):
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(CheckpointError, match=r"phase has type torch\.complex64"):
        Checkpointer(model).export_safetensors(tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []
