"""The logical state of models and optimizers, and what loading does to them: one process, no process group."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from memwall_strategy.core.errors import CheckpointError
from memwall_strategy.engine.checkpoint.model import collect_model
from memwall_strategy.runtime.checkpoint import Checkpointer, consolidate, model_state, optimizer_state

OPTIMIZERS = {
    "AdamW": {},
    "Adam": {"amsgrad": True},
    "SGD": {"lr": 0.1},
    "SGD momentum": {"lr": 0.1, "momentum": 0.9},
    "Adafactor": {},
    "LBFGS": {"max_iter": 3, "history_size": 2},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {},
    "Rprop": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "Adadelta": {},
    "Adamax": {},
    "Muon": {},
}


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    """Waiting for the disk takes most of the time of a small save, and nothing here depends on it."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


class Net(nn.Module):
    """Odd sizes, a persistent and a transient buffer, a frozen parameter."""

    def __init__(self, width: int = 7, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(5, width, bias=bias)
        self.second = nn.Linear(width, 3, bias=bias)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("cache", torch.ones(4), persistent=False)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) + self.frozen


def build(kind: str, seed: int = 0):
    torch.manual_seed(seed)
    model = Net(bias=kind != "Muon")
    trainable = [p for p in model.parameters() if p.requires_grad]
    return model, getattr(torch.optim, kind.split()[0])(trainable, **OPTIMIZERS[kind])


def take_steps(model, optimizer, count: int, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + count):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = model(batch).pow(2).sum()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


class TestModel:
    def test_values_are_references_and_transient_buffers_stay_out(self):
        model = Net()
        state = model_state(model)
        assert set(state) == {
            "first.weight", "first.bias", "second.weight", "second.bias", "seen", "frozen",
        }  # fmt: skip
        assert state["first.weight"].data_ptr() == model.first.weight.data_ptr()
        assert not state["first.weight"].requires_grad

    def test_names_do_not_depend_on_wrappers(self):
        plain = set(model_state(Net()))
        wrapped = Net()
        wrapped.first = torch.compile(checkpoint_wrapper(wrapped.first), backend="eager")
        wrapped.second = checkpoint_wrapper(torch.compile(wrapped.second, backend="eager"))
        assert any("_orig_mod" in name for name in wrapped.state_dict())
        assert any("_checkpoint_wrapped_module" in name for name, _ in wrapped.named_parameters())
        assert set(model_state(wrapped)) == plain
        assert set(model_state(torch.compile(Net(), backend="eager"))) == plain
        optimizer = torch.optim.AdamW(wrapped.parameters())
        assert optimizer_state(wrapped, optimizer, "o")["o.param_groups.0.params"] == [
            "frozen", "first.weight", "first.bias", "second.weight", "second.bias",
        ]  # fmt: skip

    def test_tied_weights_once(self):
        model = Net(width=3)
        model.third = nn.Linear(3, 3)
        model.third.weight = model.second.weight
        state = collect_model(model)
        assert "second.weight" in state.tensors and "third.weight" not in state.tensors
        assert state.aliases == {"third.weight": "second.weight"}

    def test_meta_is_refused_by_name(self):
        with torch.device("meta"):
            model = nn.Linear(2, 2)
        with pytest.raises(CheckpointError, match="weight is on the meta device"):
            model_state(model)


class TestOptimizer:
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_no_step_is_taken_and_nothing_is_copied(self, kind):
        model, optimizer = build(kind)
        before = copy.deepcopy(model.state_dict())
        made = {id(p): set(s) for p, s in optimizer.state.items()}
        flat = optimizer_state(model, optimizer, "o")
        assert {id(p): set(s) for p, s in optimizer.state.items()} == made
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        if kind != "Adagrad":  # it makes its state on construction
            assert not [key for key in flat if key.startswith("o.state")]
        take_steps(model, optimizer, 1)
        flat = optimizer_state(model, optimizer, "o")
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    assert flat[f"o.state.{name}.{key}"].data_ptr() == value.data_ptr()

    @pytest.mark.parametrize("kind", OPTIMIZERS)
    @pytest.mark.parametrize("how", ["sharded", "full", "consolidated"])
    def test_goes_on_bit_for_bit(self, kind, how, tmp_path):
        model, optimizer = build(kind)
        take_steps(model, optimizer, 2)
        checkpointer = Checkpointer(model, [optimizer])
        if how == "full":
            checkpointer.save_full(tmp_path / "c", {}, 2)
        else:
            checkpointer.save(tmp_path / "c", {}, 2)
        if how == "consolidated":
            consolidate(tmp_path / "c", tmp_path / "one.ckpt")
        expected = take_steps(model, optimizer, 3, start=2)

        again, resumed = build(kind, seed=1)
        path = tmp_path / ("one.ckpt" if how == "consolidated" else "c")
        Checkpointer(again, [resumed]).load(path)
        assert take_steps(again, resumed, 3, start=2) == expected
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))

    def test_before_the_first_step_there_is_no_state_and_loading_leaves_none(self, tmp_path):
        model, optimizer = build("AdamW")
        Checkpointer(model, [optimizer]).save(tmp_path / "c")
        take_steps(model, optimizer, 1)
        assert optimizer.state
        Checkpointer(model, [optimizer]).load(tmp_path / "c")
        assert not optimizer.state
        take_steps(model, optimizer, 1)
        assert all(float(state["step"]) == 1.0 for state in optimizer.state.values())

    def test_hyperparameters_of_schedulers_survive(self, tmp_path):
        model, optimizer = build("AdamW")
        optimizer.add_param_group({"params": [model.frozen], "lr": numpy.float64(0.5), "betas": (0.1, 0.2)})
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3)
        for step in range(2):
            take_steps(model, optimizer, 1, start=step)
            scheduler.step()
        Checkpointer(model, [optimizer]).save(tmp_path / "c", {"lr_schedulers": [scheduler.state_dict()]})

        again, resumed = build("AdamW", seed=1)
        resumed.add_param_group({"params": [again.frozen]})
        other = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(resumed, T_0=3)
        # the scheduler, too, keeps NumPy's number, which is for the caller to trust
        extra = Checkpointer(again, [resumed]).load(tmp_path / "c", weights_only=False)
        other.load_state_dict(extra["lr_schedulers"][0])
        for group, saved in zip(resumed.param_groups, optimizer.param_groups, strict=True):
            assert {k: v for k, v in group.items() if k != "params"} == {
                k: v for k, v in saved.items() if k != "params"
            }
        rates = []
        for o, s, m in ((optimizer, scheduler, model), (resumed, other, again)):
            seen = []
            for step in range(5):
                take_steps(m, o, 1, start=step)
                s.step()
                seen.append([group["lr"] for group in o.param_groups])
            rates.append(seen)
        assert rates[0] == rates[1]

    def test_a_tensor_rate_keeps_its_identity(self, tmp_path):
        model, _ = build("AdamW")
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
        Checkpointer(model, [optimizer]).save(tmp_path / "c")
        rate = optimizer.param_groups[0]["lr"]
        rate.fill_(9.0)
        Checkpointer(model, [optimizer]).load(tmp_path / "c")
        assert optimizer.param_groups[0]["lr"] is rate and float(rate) == 0.25

    def test_state_keeps_its_own_type(self, tmp_path):
        model = nn.Linear(3, 3).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight] = {"master": torch.randn(3, 3), "count": 3, "history": [None, torch.ones(2)]}
        optimizer.state["run"] = {"seen": 4}
        Checkpointer(model, [optimizer]).save(tmp_path / "c")
        saved = copy.deepcopy(optimizer.state[model.weight])
        optimizer.state.clear()
        Checkpointer(model, [optimizer]).load(tmp_path / "c")
        loaded = optimizer.state[model.weight]
        assert loaded["master"].dtype == torch.float32 and torch.equal(loaded["master"], saved["master"])
        assert loaded["count"] == 3
        assert loaded["history"][0] is None and torch.equal(loaded["history"][1], torch.ones(2))
        assert optimizer.state["run"] == {"seen": 4}

    def test_a_parameter_that_the_model_lacks_is_named(self):
        model = Net()
        optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2, 9))], lr=0.1)
        with pytest.raises(CheckpointError, match=r"parameter 5 of group 0, shape \(2, 9\)"):
            optimizer_state(model, optimizer, "optimizer_0")

    def test_several_optimizers_and_parameters_in_none(self, tmp_path):
        def build_two(seed):
            torch.manual_seed(seed)
            model = Net()
            return model, [
                torch.optim.AdamW(model.first.parameters()),
                torch.optim.SGD([model.second.weight], lr=0.1, momentum=0.9),
            ]

        model, optimizers = build_two(0)
        for optimizer in optimizers:
            take_steps(model, optimizer, 1)
        Checkpointer(model, optimizers).save(tmp_path / "c")
        again, resumed = build_two(1)
        Checkpointer(again, resumed).load(tmp_path / "c")
        assert [take_steps(model, o, 2) for o in optimizers] == [take_steps(again, o, 2) for o in resumed]


class TestLoading:
    def test_reads_into_the_tensors_that_are_there(self, tmp_path):
        model, optimizer = build("AdamW")
        take_steps(model, optimizer, 1)
        Checkpointer(model, [optimizer]).save(tmp_path / "c")
        moments = {p: s["exp_avg"] for p, s in optimizer.state.items()}
        expected = {p: m.clone() for p, m in moments.items()}
        weights = {n: p.data_ptr() for n, p in model.named_parameters()}
        take_steps(model, optimizer, 1)
        Checkpointer(model, [optimizer]).load(tmp_path / "c")
        assert all(optimizer.state[p]["exp_avg"] is m and torch.equal(m, expected[p]) for p, m in moments.items())
        assert {n: p.data_ptr() for n, p in model.named_parameters()} == weights

    def test_every_difference_is_named_and_nothing_is_changed(self, tmp_path):
        model, optimizer = build("AdamW")
        take_steps(model, optimizer, 1)
        Checkpointer(model, [optimizer]).save(tmp_path / "c")

        other, resumed = build("AdamW", seed=1)
        other.extra = nn.Linear(2, 2)
        del other.frozen
        other.forward = lambda x: other.second(torch.tanh(other.first(x)))
        resumed.add_param_group({"params": other.extra.weight})
        take_steps(other, resumed, 1)
        before = copy.deepcopy(other.state_dict())
        state = {p: copy.deepcopy(s) for p, s in resumed.state.items()}
        with pytest.raises(CheckpointError) as caught:
            Checkpointer(other, [resumed]).load(tmp_path / "c")
        text = str(caught.value)
        assert "missing in the checkpoint: extra.weight, extra.bias, optimizer_0: extra.weight" in text
        assert "only in the checkpoint: frozen" in text and "strict=False" in text
        assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())
        assert all(torch.equal(resumed.state[p]["exp_avg"], s["exp_avg"]) for p, s in state.items())

        with pytest.warns(UserWarning, match=r"in part: .*extra\.weight"):
            Checkpointer(other, [resumed]).load(tmp_path / "c", strict=False)
        assert torch.equal(other.first.weight, model.first.weight)
        assert torch.equal(other.extra.weight, before["extra.weight"])

    def test_shapes_are_named_even_when_not_strict(self, tmp_path):
        Checkpointer(Net(width=7)).save(tmp_path / "c")
        with pytest.raises(CheckpointError, match=r"first\.weight is \(7, 5\) there and \(8, 5\) here"):
            Checkpointer(Net(width=8)).load(tmp_path / "c", strict=False)

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)], "was a AdamW there and is a SGD here"),
            (lambda m: [torch.optim.AdamW(m.parameters()), torch.optim.AdamW([m.frozen])], "1 optimizers, here are 2"),
            (lambda m: [torch.optim.AdamW(m.first.parameters())], "only in the checkpoint: optimizer_0: frozen"),
        ],
    )
    def test_other_optimizers_are_refused(self, change, text, tmp_path):
        model = Net()
        Checkpointer(model, [torch.optim.AdamW(model.parameters())]).save(tmp_path / "c")
        with pytest.raises(CheckpointError, match=text):
            Checkpointer(model, change(model)).load(tmp_path / "c")

    def test_groups_that_were_unlike_are_not_merged(self, tmp_path):
        model = Net()
        groups = [{"params": model.first.parameters()}, {"params": model.second.parameters(), "weight_decay": 0.0}]
        Checkpointer(model, [torch.optim.AdamW(groups)]).save(tmp_path / "c")
        merged = torch.optim.AdamW([*model.first.parameters(), *model.second.parameters()])
        with pytest.raises(CheckpointError, match=r"first\.weight and second\.weight share a param group"):
            Checkpointer(model, [merged]).load(tmp_path / "c")

    def test_weights_alone(self, tmp_path):
        model, optimizer = build("AdamW")
        checkpointer = Checkpointer(model, [optimizer])
        checkpointer.save(tmp_path / "c", with_optimizers=False)
        with pytest.raises(CheckpointError, match="weights alone"):
            checkpointer.load(tmp_path / "c")
        again = Net()
        Checkpointer(again).load(tmp_path / "c")
        assert torch.equal(again.first.weight, model.first.weight)

    @pytest.mark.parametrize("saved_tied", [True, False])
    def test_weights_tied_on_one_side_only(self, saved_tied, tmp_path):
        class Pair(nn.Module):
            def __init__(self, tied):
                super().__init__()
                self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
                if tied:
                    self.b.weight = self.a.weight

        saved, loaded = Pair(saved_tied), Pair(not saved_tied)
        Checkpointer(saved).save(tmp_path / "c")
        Checkpointer(loaded).load(tmp_path / "c")
        assert torch.equal(loaded.a.weight, saved.a.weight)
        assert torch.equal(loaded.b.weight, saved.a.weight if not saved_tied else saved.b.weight)

    @pytest.mark.parametrize("how", ["save", "save_full"])
    def test_extra_state_and_entries_made_for_the_state_dict(self, how, tmp_path):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.seen, self.total = {"batches": 0}, torch.zeros(2)

            def get_extra_state(self):
                return self.seen

            def set_extra_state(self, state):
                self.seen = state

            def _save_to_state_dict(self, destination, prefix, keep_vars):
                super()._save_to_state_dict(destination, prefix, keep_vars)
                destination[prefix + "total"] = self.total * 1

            def _load_from_state_dict(self, state_dict, prefix, *args):
                self.total = state_dict.pop(prefix + "total", self.total)
                super()._load_from_state_dict(state_dict, prefix, *args)

        model = nn.Sequential(nn.Linear(2, 2), Counting())
        model[1].seen, model[1].total = {"batches": 7}, torch.tensor([1.0, 2.0])
        getattr(Checkpointer(model), how)(tmp_path / "c")
        again = nn.Sequential(nn.Linear(2, 2), Counting())
        Checkpointer(again).load(tmp_path / "c")
        assert again[1].seen == {"batches": 7} and again[1].total.tolist() == [1.0, 2.0]

    def test_what_a_callback_left_out_is_not_saved(self, tmp_path):
        model = Net()
        state = model_state(model)
        state.pop("frozen")
        Checkpointer(model).save(tmp_path / "c", state_dict=state)
        with pytest.raises(CheckpointError, match="missing in the checkpoint: frozen"):
            Checkpointer(model).load(tmp_path / "c")
