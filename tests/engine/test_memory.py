"""The account on plain modules: no process group, no FSDP2."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

from memwall_strategy.core.block import Kind, Phase
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.engine.activations import measure_activations
from memwall_strategy.engine.memory import KINDS, MemoryAccount

FLOAT = 4


def held(account: MemoryAccount) -> dict[str, int]:
    return {str(kind): size for kind, size in account.current().items() if size}


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(tokens)))


def step(model: nn.Module, account: MemoryAccount, *optimizers: torch.optim.Optimizer) -> None:
    with account.phase(Phase.FORWARD):
        loss = model(torch.arange(6)).sum()
    with account.phase(Phase.BACKWARD):
        loss.backward()
    with account.phase(Phase.STEP):
        for optimizer in optimizers:
            optimizer.step()


# -- what is counted --


def test_a_step_of_a_tied_model_by_kind():
    model, account = TiedNet(), MemoryAccount()
    optimizer = torch.optim.AdamW(model.parameters())
    account.attach(model, [optimizer])
    weights = nbytes(model.table.weight, model.norm.weight, model.norm.bias, model.head.bias)  # the table once
    buffers = nbytes(*model.buffers())
    assert held(account) == {"param": weights, "buffer": buffers}
    step(model, account, optimizer)
    steps = 4 * FLOAT  # one counter for each of four parameters
    expected = dict.fromkeys(("param", "grad", "exp_avg", "exp_avg_sq"), weights) | {"buffer": buffers}
    assert held(account) == expected | {"optimizer": steps}
    assert account.device_bytes == 4 * weights + buffers + steps
    optimizer.zero_grad()
    assert "grad" not in held(account)


def test_frozen_weights_have_neither_gradient_nor_state():
    model, account = nn.Linear(3, 5), MemoryAccount()
    model.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    account.attach(model, [optimizer])
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert held(account) == {"param": 20 * FLOAT, "grad": 5 * FLOAT, "optimizer": 5 * FLOAT}
    model.weight.requires_grad_(True)  # unfrozen in mid-training
    model(torch.ones(2, 3)).sum().backward()
    assert held(account)["grad"] == 20 * FLOAT


def test_two_optimizers_and_nested_state():
    model, account = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), MemoryAccount()
    first = torch.optim.Adagrad(model[0].parameters())
    second = torch.optim.LBFGS(model[1].parameters(), max_iter=3)
    account.attach(model, [first, second])
    batch = torch.randn(5, 3)

    def closure() -> torch.Tensor:
        second.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        return loss

    closure()
    first.step()
    second.step(closure)
    found: dict[int, int] = {}
    for optimizer in (first, second):
        for state in optimizer.state.values():
            for value in state.values():
                for tensor in value if isinstance(value, list) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert len(found) > 6
    assert held(account)["optimizer"] == sum(found.values())


def test_weights_that_are_replaced():
    model, account = nn.Linear(3, 5), MemoryAccount()
    account.attach(model)
    before = held(account)
    kept = model.state_dict()  # holds the old weights: they live, but are no weights of the model any more
    model.load_state_dict({k: v.clone() for k, v in kept.items()}, assign=True)
    assert account.device_bytes == sum(before.values())
    model.load_state_dict({k: v.double() for k, v in kept.items()}, assign=True)
    assert account.device_bytes == 2 * sum(before.values())
    model.float()  # through .data, the old ones freed: found at the next change of phase
    account.phase(Phase.FORWARD)
    assert account.device_bytes == sum(before.values())


def test_weights_that_come_off_the_meta_device():
    with torch.device("meta"):
        model = nn.Linear(3, 5)
    account = MemoryAccount()
    account.attach(model)
    assert account.device_bytes == 0
    model.to_empty(device="cpu")
    account.phase(Phase.FORWARD)
    assert held(account) == {"param": 20 * FLOAT}


def test_optimizer_state_that_is_loaded():
    model, account = nn.Linear(3, 5), MemoryAccount()
    donor = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    donor.step()
    optimizer = torch.optim.AdamW(model.parameters())
    account.attach(model, [optimizer])
    optimizer.load_state_dict(copy.deepcopy(donor.state_dict()))
    assert account.device_bytes == 4 * 20 * FLOAT + 2 * FLOAT


def test_sparse_gradients():
    model, account = nn.Embedding(100, 3, sparse=True), MemoryAccount()
    account.attach(model)
    model(torch.tensor([1, 5])).sum().backward()
    assert held(account) == {"param": 300 * FLOAT, "grad": 2 * 3 * FLOAT + 2 * 8}


def test_views_count_once_and_whole():
    account = MemoryAccount()
    whole = torch.empty(1000)
    account.track(whole[10:20], Kind.COMM)
    account.track(whole[500:], Kind.COMM)
    assert held_without_model(account) == {"comm": 4000}
    part = whole[:1]
    del whole
    assert held_without_model(account) == {"comm": 4000}
    del part
    assert held_without_model(account) == {}


def held_without_model(account: MemoryAccount) -> dict[str, int]:
    return {str(kind): size for kind, size in account.current().items() if size}


# -- peaks --


def test_peaks_by_phase_and_kind():
    account = MemoryAccount()
    account.phase(Phase.FORWARD)
    account.add(Kind.GATHERED, 100)
    account.add(Kind.COMM, 10)
    account.remove(Kind.COMM, 10)
    account.phase(Phase.BACKWARD)
    account.add(Kind.GRAD, 30)
    account.remove(Kind.GATHERED, 100)
    account.add(Kind.GRAD, 50)
    account.phase(Phase.IDLE)
    peak, kinds = account.peak(), account.kind_peaks()
    assert (peak[Phase.FORWARD][Kind.GATHERED], peak[Phase.FORWARD][Kind.COMM]) == (100, 10)
    assert (peak[Phase.BACKWARD][Kind.GATHERED], peak[Phase.BACKWARD][Kind.GRAD]) == (100, 30)
    assert (kinds[Phase.BACKWARD][Kind.GATHERED], kinds[Phase.BACKWARD][Kind.GRAD]) == (100, 80)
    assert account.peak_bytes == 130
    account.reset_peak()
    assert account.peak_bytes == account.device_bytes == 80
    assert list(account.current())[: len(KINDS)] == list(KINDS)


def test_phase_as_context_manager_goes_back():
    account = MemoryAccount()
    with account.phase(Phase.FORWARD), account.phase(Phase.BACKWARD):
        account.add(Kind.COMM, 7)
    account.add(Kind.COMM, 1)
    assert account.kind_peaks()[Phase.BACKWARD][Kind.COMM] == 7
    assert account.kind_peaks()[Phase.IDLE][Kind.COMM] == 8


def test_the_peak_of_backward_is_the_largest_gradient_set():
    model, account = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), MemoryAccount()
    account.attach(model)
    account.phase(Phase.BACKWARD)
    model(torch.ones(1, 8)).sum().backward()
    model.zero_grad()
    account.phase(Phase.IDLE)
    weights = nbytes(*model.parameters())
    assert account.peak()[Phase.BACKWARD][Kind.GRAD] == weights
    assert account.device_bytes == weights


def test_more_removed_than_added():
    account = MemoryAccount()
    account.add(Kind.COMM, 5)
    with pytest.raises(MemwallError, match="6 bytes of comm were removed, 5 are booked"):
        account.remove(Kind.COMM, 6)


def test_budget_names_what_is_held_and_a_remedy():
    account = MemoryAccount()
    account.phase(Phase.BACKWARD)
    account.add(Kind.PARAM, 1024)
    account.add(Kind.GATHERED, 4096)
    account.check_budget(5120)
    with pytest.raises(MemwallError) as error:
        account.check_budget(4096)
    message = str(error.value)
    assert "in backward: this rank held 5.0 KiB (param 1.0 KiB, gathered 4.0 KiB)" in message
    assert "the budget is 4.0 KiB, 1.0 KiB (1024 bytes) are missing" in message
    assert "overlap.prefetch" in message


# -- threads and the garbage collector --


def test_lanes_book_from_their_threads():
    account = MemoryAccount()
    failures = []

    def work(seed: int) -> None:
        try:
            for i in range(300):
                account.add(Kind.COMM, 10 + seed)
                buffer = torch.empty(1 + i % 7)
                account.track(buffer, Kind.GATHERED)
                account.track(buffer, Kind.GRAD)
                account.remove(Kind.COMM, 10 + seed)
                del buffer
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert held_without_model(account) == {}
    assert account.kind_peaks()[Phase.IDLE][Kind.COMM] <= 10 + 11 + 12 + 13


def test_storages_that_only_the_collector_frees():
    account = MemoryAccount()

    class Knot:
        pass

    def tie() -> None:
        knot = Knot()
        knot.self, knot.buffer = knot, torch.empty(256)
        account.track(knot.buffer, Kind.COMM)

    gc.disable()
    try:
        tie()
        assert account.device_bytes == 1024
        gc.collect()
        assert account.device_bytes == 0
    finally:
        gc.enable()


# -- deep mode --


def test_activations_are_what_autograd_saves_and_go_with_it():
    model = nn.Sequential(nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 2))
    account = MemoryAccount(deep=True)
    account.attach(model)
    batch = torch.randn(3, 6)
    with account.saved_activations():
        loss = model(batch).sum()
    # inputs of both linear layers; the sigmoid's output is the second one's input, weights are not activations
    assert held(account)["activation"] == (3 * 6 + 3 * 4) * FLOAT
    loss.backward(retain_graph=True)
    assert held(account)["activation"] == (3 * 6 + 3 * 4) * FLOAT
    loss.backward()
    assert "activation" not in held(account)
    with account.saved_activations():
        loss = model(batch).sum()
    del loss  # never used
    assert "activation" not in held(account)


def test_gradients_are_the_same_in_deep_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2))
    batch = torch.randn(3, 6)
    model(batch).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    account = MemoryAccount(deep=True)
    account.attach(model)
    with account.saved_activations():
        loss = model(batch).square().sum()
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))


def test_without_deep_mode_no_hook_runs():
    model, account = nn.Linear(6, 4), MemoryAccount()
    account.attach(model)
    with account.saved_activations():
        loss = model(torch.randn(3, 6, requires_grad=True)).sum()
    assert "activation" not in held(account)
    loss.backward()


def test_a_measurement_equals_the_account():
    model = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Sigmoid(), nn.Linear(4, 2)), nn.Linear(2, 1))
    batch = torch.randn(3, 6)
    account = MemoryAccount(deep=True)
    account.attach(model)
    with account.saved_activations():
        loss = model(batch).square().sum()
    units, outside = measure_activations(model, batch, unit_names=["0", "1"], loss=lambda out: out.square().sum())
    assert sum(units) + outside == held(account)["activation"]
    assert units == (3 * 6 * FLOAT, 3 * 4 * FLOAT)  # an input; the sigmoid's output, which is the next input too
    del loss
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Sigmoid(), nn.Linear(4, 2)), nn.Linear(2, 1))
        meta_batch = torch.empty(3, 6)
    assert measure_activations(empty, meta_batch, unit_names=["0", "1"], loss=lambda o: o.square().sum()) == (
        units,
        outside,
    )


def test_a_measurement_of_an_unknown_unit():
    with pytest.raises(ConfigError, match="unit 'layer' is no module of Sequential"):
        measure_activations(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), unit_names=["layer"])


# -- life cycle --


def test_a_counted_model_can_be_copied_and_pickled():
    model, account = nn.Linear(3, 5), MemoryAccount()
    account.attach(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.load_state_dict(model.state_dict())
    assert held(account) == {"param": 20 * FLOAT}


def test_detach_leaves_nothing_behind():
    model, account = nn.Linear(3, 5), MemoryAccount()
    optimizer = torch.optim.AdamW(model.parameters())
    account.attach(model, [optimizer])
    account.add(Kind.COMM, 11)  # a lane's own booking outlives the model
    step_hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    account.detach()
    assert held_without_model(account) == {"comm": 11}
    assert not any(step_hooks)
    assert not model._load_state_dict_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert held_without_model(account) == {"comm": 11}
    account.remove(Kind.COMM, 11)


def test_attach_again_starts_with_the_new_model():
    account = MemoryAccount()
    first, second = nn.Linear(3, 5), nn.Linear(2, 2)
    account.attach(first)
    account.attach(second)
    assert held(account) == {"param": 6 * FLOAT}
    first(torch.ones(1, 3)).sum().backward()
    assert held(account) == {"param": 6 * FLOAT}


def test_the_account_does_not_keep_a_model_alive_after_detach():
    model, account = nn.Linear(3, 5), MemoryAccount()
    account.attach(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    account.detach()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_is_wrapped_exists_in_this_torch():
    """FSDP2's private methods that the account hangs on, by name; ``test_memory_ranks`` proves what they mean."""
    from memwall_strategy.engine.fsdp import FSDPParam, FSDPParamGroup

    for name in ("unshard", "_to_unsharded", "_to_sharded", "_to_sharded_post_forward", "post_backward"):
        assert callable(getattr(FSDPParamGroup, name)), name
    annotated = FSDPParam.__annotations__
    for name in ("_sharded_param_data", "sharded_param", "_unsharded_param", "unsharded_accumulated_grad",
                 "all_gather_outputs", "_unsharded_inner_tensors", "param_dtype"):  # fmt: skip
        assert name in annotated, name
