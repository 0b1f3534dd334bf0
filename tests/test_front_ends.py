"""The same model, data and seed give the same losses under every front end."""

from __future__ import annotations

from tests.accelerate.helpers import make_accelerator, whole_loader
from tests.lightning.checks import Here, on_ranks, rank_results  # noqa: F401 - the fixture behind on_ranks
from tests.lightning.models import (
    assert_close,
    loss_of,
    make_loader,
    make_module,
    make_net,
    make_optimizer,
    make_trainer,
    mean_over_ranks,
    train_plain,
)
from tests.lightning.test_fabric import make_fabric, train_fabric

STEPS = 20


@on_ranks(2)
def test_the_same_losses_under_every_front_end(here: Here) -> None:
    """Lightning Trainer, Fabric, Accelerate and a plain single-process loop: 1e-6 relative over 20 steps in fp32."""
    count = STEPS * 2 * here.world
    wanted = train_plain(make_net("gpt"), "gpt", steps=STEPS, micro=2 * here.world)

    module = make_module("gpt")
    make_trainer(here.world).fit(module, make_loader("gpt", count, 2, rank=here.rank, world=here.world))
    assert_close(mean_over_ranks(module.losses), wanted)

    fabric_losses, _ = train_fabric(here, make_fabric(), "gpt", steps=STEPS)
    assert_close(mean_over_ranks(fabric_losses), wanted)

    acc = make_accelerator()
    net = make_net("gpt")
    model, optimizer, loader = acc.prepare(net, make_optimizer(net.parameters()), whole_loader("gpt", count, 2))
    losses = []
    for batch in loader:
        loss = loss_of(model, batch)
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_close(mean_over_ranks(losses), wanted)
    acc.free_memory()
