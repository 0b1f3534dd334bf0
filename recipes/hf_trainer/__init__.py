"""``transformers.Trainer`` over memwall; ``torchrun --nproc-per-node 2 -m recipes.hf_trainer`` trains a tiny model."""

from .trainer import MemwallTrainer

__all__ = ["MemwallTrainer"]
