"""The model: token and position embeddings, pre-norm blocks in one ``ModuleList``, a language-model head.

Built on the meta device it holds no memory; after ``to_empty`` call ``init_weights`` on the whole, or
``reset_parameters`` on each module (what FSDP2 and Lightning do): both give the weights of a normal construction.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .options import GPTOptions

INIT_STD = 0.02
"""Standard deviation of GPT-2's initial weights."""


class Linear(nn.Linear):
    """A linear layer with GPT-2's initial weights."""

    def __init__(self, inputs: int, outputs: int, *, std: float = INIT_STD, bias: bool = True) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table with GPT-2's initial weights."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Attention(nn.Module):
    """Causal self-attention: every token looks at itself and those before it."""

    def __init__(self, options: GPTOptions) -> None:
        super().__init__()
        self.heads = options.heads
        self.dropout = options.dropout
        self.qkv = Linear(options.hidden, 3 * options.hidden)
        self.out = Linear(options.hidden, options.hidden, std=residual_std(options))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


class MLP(nn.Module):
    """Two linear layers with a GELU between, applied to every token alone."""

    def __init__(self, options: GPTOptions) -> None:
        super().__init__()
        self.up = Linear(options.hidden, options.mlp_ratio * options.hidden)
        self.down = Linear(options.mlp_ratio * options.hidden, options.hidden, std=residual_std(options))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """One unit: attention and MLP, each added to the residual stream."""

    def __init__(self, options: GPTOptions) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(options.hidden)
        self.attention = Attention(options)
        self.norm_mlp = nn.LayerNorm(options.hidden)
        self.mlp = MLP(options)
        self.drop = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm_attention(x)))
        return x + self.drop(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """A decoder-only transformer."""

    def __init__(self, options: GPTOptions) -> None:
        super().__init__()
        self.options = options
        self.embed = Embedding(options.vocab, options.hidden)
        self.position = Embedding(options.context, options.hidden)
        self.drop = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.hidden)
        self.head = None if options.tied_head else Linear(options.hidden, options.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: int64, ``(batch, length)``, length at most ``options.context``.

        Returns:
            ``(batch, length, vocab)`` in the dtype of the weights.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embed(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        # A tied head reads the table itself: a second registration of one parameter would come apart in `to_empty`.
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Give every parameter its initial value again, after ``to_empty``."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm)):
                module.reset_parameters()


def residual_std(options: GPTOptions) -> float:
    """GPT-2's smaller start for layers that add to the residual stream: their number is 2 a block."""
    return INIT_STD / math.sqrt(2 * options.layers)
