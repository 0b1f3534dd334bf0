"""The engine on one CUDA card, one rank, NCCL: what does not need a second card.

Reference: the same model in a plain loop on the same card. Matrix products in fp32 are kept in fp32 (no TF32), so the
tolerance is that of another order of additions.
"""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks

pytestmark = pytest.mark.requires_cuda(1)

STEPS = 10
FP32_TOLERANCE = 1e-5
"""Relative; sums run in another order on shards."""
BF16_TOLERANCE = 3e-2
"""Relative; bf16 keeps 8 bits of mantissa."""


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _batches(width: int = 256):
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        x = torch.randn(32, width, generator=generator).cuda()
        yield x, (x[:, 0] > 0).long()


def _loss(model: torch.nn.Module, batch) -> torch.Tensor:
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x).float(), y)


def train(rank: int, world: int, precision: str) -> dict:
    import torch.distributed as dist

    from memwall_strategy import MemwallConfig, OverlapConfig
    from memwall_strategy.engine.sharding import data_parallel_mesh
    from memwall_strategy.runtime import Runtime

    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    try:
        torch.manual_seed(0)
        plain = Net().cuda()
        torch.manual_seed(0)
        model = Net()
        runtime = Runtime(
            MemwallConfig(overlap=OverlapConfig(prefetch=2)),
            mesh=data_parallel_mesh("cuda", world, 1),
            precision=precision,
        )
        runtime.setup(model)
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        runtime.add_optimizers([optimizer])
        pairs = []
        for batch in _batches():
            expected = _loss(plain, batch)
            expected.backward()
            reference.step()
            reference.zero_grad()
            found = runtime.step([batch], lambda b: _loss(model, b), optimizer)
            pairs.append((expected.item(), found.item()))
        torch.cuda.synchronize()
        figures = runtime.metrics()
        held = runtime.memory.device_bytes
        allocated = torch.cuda.memory_allocated()
        lanes = sorted(runtime.lanes)
        runtime.close()
        return {"pairs": pairs, "metrics": figures, "held": held, "allocated": allocated, "lanes": lanes}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", FP32_TOLERANCE), ("bf16-mixed", BF16_TOLERANCE)])
def test_training_equals_a_plain_loop(precision: str, tolerance: float) -> None:
    (result,) = run_ranks(train, 1, timeout_s=200, precision=precision)
    for expected, found in result["pairs"]:
        assert found == pytest.approx(expected, rel=tolerance)


def test_streams_not_lanes_and_the_account_is_within_the_allocator() -> None:
    (result,) = run_ranks(train, 1, timeout_s=200, precision="32-true")
    assert result["lanes"] == []  # the engine's own streams hide communication on CUDA
    assert 0 < result["held"] <= result["allocated"]
    assert result["metrics"]["memwall/step_s"] > 0


def reset(rank: int, world: int) -> dict:
    import torch.distributed as dist

    from memwall_strategy.engine.reset import reset_aborted_step
    from memwall_strategy.engine.sharding import data_parallel_mesh, shard_model

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    try:
        torch.manual_seed(0)
        model = Net()
        shard_model(model, data_parallel_mesh("cuda", world, 1), precision="32-true")
        batch = next(_batches())

        def gradients() -> list[torch.Tensor]:
            model.zero_grad(set_to_none=True)
            _loss(model, batch).backward()
            return [p.grad.full_tensor().clone() for p in model.parameters()]

        clean = gradients()

        def fail(module, args, output):
            output.register_hook(_raise)

        handle = model.blocks[1].register_forward_hook(fail)
        try:
            _loss(model, batch).backward()
        except RuntimeError as error:
            assert "on purpose" in str(error)
        handle.remove()
        torch.cuda.synchronize()
        dropped = reset_aborted_step(model)
        return {"dropped": dropped, "equal": all(torch.equal(a, b) for a, b in zip(clean, gradients(), strict=True))}
    finally:
        dist.destroy_process_group()


def _raise(gradient: torch.Tensor) -> None:
    raise RuntimeError("on purpose")


def test_a_backward_that_broke_leaves_no_gradient_behind() -> None:
    (result,) = run_ranks(reset, 1, timeout_s=200)
    assert result["equal"]


def fit(rank: int, world: int, precision: str) -> dict:
    import lightning.pytorch as L

    import memwall_strategy.lightning  # noqa: F401 - registers the name

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.losses: list[float] = []

        def training_step(self, batch, batch_idx):
            loss = _loss(self.net, batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module = Module()
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*(torch.cat(t).cpu() for t in zip(*_batches(), strict=True))), batch_size=32
    )
    trainer = L.Trainer(
        strategy="memwall", accelerator="gpu", devices=1, precision=precision, max_epochs=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, gradient_clip_val=1.0,
        accumulate_grad_batches=2,
    )  # fmt: skip
    trainer.fit(module, data)
    return {"losses": module.losses, "scaler": trainer.scaler is not None}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_the_trainer_learns(precision: str) -> None:
    (result,) = run_ranks(fit, 1, timeout_s=200, env={"TORCHELASTIC_RUN_ID": "gpu"}, precision=precision)
    assert result["losses"][-1] < result["losses"][0]
    assert result["scaler"] == (precision == "16-mixed")
