"""What autograd saves between forward and backward: estimated from a GPT's dimensions, or measured.

The estimate counts, for each tensor that the operations of a pre-norm transformer block save, its elements in units
of ``micro_batch * sequence * hidden``. Measured numbers come from ``memwall_strategy.engine.activations``, which
counts what autograd saves in one forward, on the meta device where the model does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.planner.specs import item_bytes

_BLOCK_HIDDEN_TENSORS = 16
"""Hidden-sized tensors that a block saves with MLP ratio 4, fused attention and no dropout: inputs of both norms (2),
of the query-key-value projection (1), q, k, v (3), the attention's output, which the projection reads (1), input of
the first MLP layer (1), and the two 4x tensors around the activation function (8). Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022), count the same and add dropout masks."""

KEPT_BY_SELECTIVE = 11 / 16
"""Share of these that stays when only matrix products and attention are kept: the block's input, q, k, v, the
attention's output, what both projections and the 4x layer return."""

KEPT_BY_RECOMPUTE = 1 / 16
"""Share that stays when a block keeps its input alone."""

_ROOT_HIDDEN_TENSORS = 2
"""Inputs of the last norm and of the head."""


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """Bytes that autograd saves for one micro-batch, per unit.

    Attributes:
        unit_bytes: one entry for each unit, in forward order.
        root_bytes: what the root saves outside the units: embeddings, head, loss.
        micro_batch: the batch that the numbers are for.
        source: ``"estimated"`` or ``"measured"``.
    """

    unit_bytes: tuple[int, ...]
    root_bytes: int
    micro_batch: int
    source: str

    def at(self, micro_batch: int) -> ActivationSpec:
        """The same for another micro-batch; linear, since every saved tensor but scalars has a batch dimension."""
        if micro_batch < 1:
            raise ConfigError(f"micro_batch={micro_batch} must be at least 1.")
        return replace(
            self,
            unit_bytes=tuple(size * micro_batch // self.micro_batch for size in self.unit_bytes),
            root_bytes=self.root_bytes * micro_batch // self.micro_batch,
            micro_batch=micro_batch,
        )


def under_mode(spec: ActivationSpec, mode: str) -> ActivationSpec:
    """What is alive when all units do the same with their activations, by the shares of a transformer block.

    Args:
        spec: all that autograd saves.
        mode: ``recompute``, ``selective`` or ``offload``; with ``auto`` and ``keep`` all of it.
    """
    widest = max(spec.unit_bytes, default=0)
    match mode:
        case "selective":
            return replace(spec, unit_bytes=tuple(int(size * KEPT_BY_SELECTIVE) for size in spec.unit_bytes))
        case "recompute":  # in backward one unit's come back at a time, when the root's are gone
            units = tuple(int(size * KEPT_BY_RECOMPUTE) for size in spec.unit_bytes)
            return replace(spec, unit_bytes=units, root_bytes=max(spec.root_bytes, widest))
        case "offload":  # one unit's leave or come while another's are in use
            units = (0,) * len(spec.unit_bytes)
            return replace(spec, unit_bytes=units, root_bytes=max(spec.root_bytes, min(2, len(units)) * widest))
        case _:
            return spec


def gpt_activations(
    *,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int,
    micro_batch: int,
    dtype: str = "float32",
    mlp_ratio: float = 4.0,
    fused_attention: bool = True,
) -> ActivationSpec:
    """Estimate a GPT's saved activations, without dropout.

    For a plain pre-norm block on CPU this is what autograd saves, to 1 % (``tests/planner/test_activations.py``).

    Args:
        dtype: of the compute, by name.
        fused_attention: ``scaled_dot_product_attention`` without the score matrix; else scores and probabilities are
            saved too.
    """
    tokens = micro_batch * sequence
    item = item_bytes(dtype)
    hidden_tensors = _BLOCK_HIDDEN_TENSORS + 2 * (mlp_ratio - 4.0)
    statistics = 4 * tokens * item_bytes("float32")  # mean and inverse deviation of two norms
    scores = heads * micro_batch * sequence
    attention = scores * item_bytes("float32") if fused_attention else 2 * scores * sequence * item
    block = int(hidden_tensors * tokens * hidden * item) + statistics + attention
    loss = tokens * vocabulary * item_bytes("float32") + tokens * item_bytes("int64")  # log-probabilities and targets
    root = _ROOT_HIDDEN_TENSORS * tokens * hidden * item + tokens * item_bytes("int64") + loss
    return ActivationSpec((block,) * layers, root, micro_batch, "estimated")
