"""Random number generators of one rank: torch (CPU and every initialised CUDA device), Python and NumPy.

States are kept as tensors, so that a file of them loads with ``weights_only=True``.

At another world size: a rank that existed when the checkpoint was written takes up its own state again. A rank beyond
them seeds all generators from a hash of the state of rank ``rank % saved world`` and its own number: always the same
for the same checkpoint, and different from every other rank. States of ranks that no longer exist are not used.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy
import torch

_NUMPY_SEED_RANGE = 2**32  # numpy.random.seed takes no more


def capture_rng() -> dict[str, Any]:
    """Return the state of this process's generators, as tensors and numbers."""
    version, words, gauss = random.getstate()
    algorithm, key, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "algorithm": algorithm,
            "key": torch.from_numpy(key.astype(numpy.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }


def restore_rng(states: list[dict[str, Any]], rank: int) -> None:
    """Set this process's generators from the saved states of all ranks, as the module's text says."""
    if not states:
        return
    if rank < len(states):
        _apply(states[rank])
    else:
        _seed(_derived_seed(states, rank))


def _apply(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        for device, saved in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(saved, device)
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    key = legacy["key"].numpy().astype(numpy.uint32)
    numpy.random.set_state((legacy["algorithm"], key, legacy["position"], legacy["has_gauss"], legacy["cached"]))


def _derived_seed(states: list[dict[str, Any]], rank: int) -> int:
    origin = states[rank % len(states)]["torch"].numpy().tobytes()
    digest = hashlib.sha256(origin + f":{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _seed(seed: int) -> None:
    torch.manual_seed(seed)  # seeds CUDA devices too
    random.seed(seed)
    numpy.random.seed(seed % _NUMPY_SEED_RANGE)
