"""The order of an epoch's samples: a permutation, the dataset's own order, or what a user's sampler draws.

An order follows from (seed, epoch, round) alone, so that it can be made again after a resume, on any rank.

What it does not do: an order that a sampler drew is made again by drawing again from the same seed. A sampler that does
not repeat itself then (it holds a random generator that nobody can see, say) is found out by the fingerprint.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

FINGERPRINT_SAMPLES = 65_536
"""At most so many indices, evenly spread, enter the fingerprint of an order: a few milliseconds, once an epoch."""

ROUND_STRIDE = 1_000_003
"""Distance of the seeds of two rounds of one epoch: above any number of epochs, so that no two orders share one."""

SEED_LIMIT = 2**63
"""Seeds are taken modulo this: ``torch.Generator.manual_seed`` takes 64 bits with a sign."""

NUMPY_SEED_LIMIT = 2**32
"""``numpy.random.seed`` takes 32 bits."""


def mix_seeds(*parts: object) -> int:
    """A seed that follows from all parts and is shared by no other combination of them that anybody will meet."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEED_LIMIT


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generators of torch, Python and NumPy for a while; afterwards they are as they were before."""
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    seed_generators(seed)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed_generators(seed: int) -> None:
    """Seed the CPU generators of torch, Python and NumPy (``torch.manual_seed`` would touch the accelerators' too)."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % NUMPY_SEED_LIMIT)


class Order:
    """The samples of each (epoch, round), in order. The last one drawn is kept."""

    items_are_batches = False
    """Whether each item is a whole batch already."""

    def __init__(self, name: str, seed: int, shuffle: bool) -> None:
        self.name, self.seed, self.shuffle = name, seed, shuffle
        self._drawn: tuple[tuple[object, ...], Any] | None = None
        self._print: tuple[tuple[object, ...], str] | None = None

    def size(self, epoch: int, round_: int) -> int:
        """Number of samples."""
        return len(self.items(epoch, round_))

    def items(self, epoch: int, round_: int) -> Any:
        """The samples, as something that has a length and can be sliced."""
        key = (epoch, round_, self.seed, self.shuffle)
        if self._drawn is None or self._drawn[0] != key:
            self._drawn = (key, self._draw(epoch, round_))
        return self._drawn[1]

    def fingerprint(self, epoch: int, round_: int) -> str:
        """A hash that two orders share only when they are the same."""
        key = (epoch, round_, self.seed, self.shuffle)
        if self._print is None or self._print[0] != key:
            items = self.items(epoch, round_)
            spread = as_list(items[:: max(1, -(-len(items) // FINGERPRINT_SAMPLES))])
            self._print = (key, hashlib.blake2b(repr((len(items), spread)).encode(), digest_size=16).hexdigest())
        return self._print[1]

    def _draw(self, epoch: int, round_: int) -> Any:
        raise NotImplementedError


class Permutation(Order):
    """The dataset's own order, or one permutation of it each epoch: the one that DistributedSampler would use."""

    def __init__(self, length: int, *, shuffle: bool, seed: int) -> None:
        super().__init__("dataset", seed, shuffle)
        self.length = length

    def size(self, epoch: int, round_: int) -> int:
        return self.length

    def _draw(self, epoch: int, round_: int) -> Any:
        if not self.shuffle:
            return range(self.length)
        generator = torch.Generator()
        generator.manual_seed((self.seed + epoch + round_ * ROUND_STRIDE) % SEED_LIMIT)
        return torch.randperm(self.length, generator=generator)


class DrawnOrder(Order):
    """What a user's sampler (or batch sampler) yields, drawn whole at the start of a pass.

    It draws with torch's, Python's and NumPy's generators, and its own ``generator`` where it has one, seeded from
    (seed, epoch, round): the same draw can be made again, and the run's own random numbers are not touched.

    Args:
        sampler: anything that is iterable and has a length; its ``set_epoch`` is called where there is one.
        shuffle: permute what it yields as well, as trainers do that wrap a sampler in a DistributedSampler.
        batches: it yields whole batches.
    """

    def __init__(self, sampler: Any, *, seed: int, shuffle: bool = False, batches: bool = False) -> None:
        super().__init__(type(sampler).__name__, seed, shuffle)
        self.sampler = sampler
        self.items_are_batches = batches

    def _draw(self, epoch: int, round_: int) -> list[Any]:
        for part in (self.sampler, getattr(self.sampler, "sampler", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        with seeded(mix_seeds("order", self.seed, epoch, round_)), self._own_generator(epoch, round_):
            items = list(self.sampler)
        if self.shuffle:
            permutation = Permutation(len(items), shuffle=True, seed=self.seed).items(epoch, round_)
            items = [items[i] for i in permutation.tolist()]
        return items

    @contextlib.contextmanager
    def _own_generator(self, epoch: int, round_: int) -> Iterator[None]:
        generator = getattr(self.sampler, "generator", None)
        if not isinstance(generator, torch.Generator):
            yield
            return
        before = generator.get_state()
        generator.manual_seed(mix_seeds("order", self.seed, generator.initial_seed(), epoch, round_))
        try:
            yield
        finally:
            generator.set_state(before)


def as_list(items: Any) -> list[Any]:
    """A slice of an order as a plain list."""
    return items.tolist() if isinstance(items, torch.Tensor) else list(items)
