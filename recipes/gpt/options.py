"""What can be set about the model. Stdlib only: checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

from memwall_strategy.core.errors import ConfigError

from ..text.options import VOCAB


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTOptions:
    """Sizes of a GPT."""

    layers: int = 4
    """Transformer blocks."""

    heads: int = 4
    """Attention heads of each block; must divide ``hidden``."""

    hidden: int = 256
    """Width of the residual stream."""

    context: int = 256
    """Longest sequence: rows of the position table."""

    vocab: int = VOCAB
    """Token values, at least as many as the data has. For bytes: 256 and the document end."""

    mlp_ratio: int = 4
    """Width of the MLP over ``hidden``."""

    dropout: float = 0.0
    """Share of activations dropped after embedding, attention and MLP."""

    tied_head: bool = True
    """Use the token embedding as the output layer too."""

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "hidden", "context", "vocab", "mlp_ratio"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"model.{name}={value!r} must be a whole number of at least 1.")
        if self.hidden % self.heads:
            fits = [n for n in range(1, self.hidden + 1) if self.hidden % n == 0]
            near = min(fits, key=lambda n: abs(n - self.heads))
            raise ConfigError(
                f"model.hidden={self.hidden} is not divisible by model.heads={self.heads}. "
                f"Use model.heads={near} or model.hidden={self.heads * max(1, round(self.hidden / self.heads))}."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout={self.dropout!r} must be at least 0 and below 1.")
