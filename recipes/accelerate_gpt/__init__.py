"""A small GPT under Accelerate's own loop: ``torchrun --nproc-per-node 2 -m recipes.accelerate_gpt``."""
