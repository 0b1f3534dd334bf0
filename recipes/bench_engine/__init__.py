"""The engine's price and gain, measured under Lightning's Trainer: see ``__main__``."""
