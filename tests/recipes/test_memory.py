"""recipes.memory: what its figures are made of, and a run that tells one failure from another."""

from __future__ import annotations

import ctypes
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memwall_strategy.core.block import Block, Tier
from memwall_strategy.core.errors import ConfigError, PoolFull
from recipes.cgroup import Limited
from recipes.memory import __main__ as memory
from recipes.memory import largest, limited
from recipes.memory.beside_raw import BesideRaw, raw_copy
from recipes.memory.link import CARD_FLOPS, CARD_LINK_BYTES_PER_S, CARD_TOKENS, SlowLink, scaled_rate

# -- the search --


@pytest.mark.parametrize("start", [1, 2, 3, 15, 16, 33, 100])
@pytest.mark.parametrize("most", [0, 1, 2, 3, 14, 15, 16, 17, 31, 40, 200])
def test_bisect_finds_the_largest_and_asks_nothing_twice(start: int, most: int) -> None:
    asked: list[int] = []

    def fits(layers: int) -> bool:
        asked.append(layers)
        return layers <= most

    assert largest.bisect(fits, start) == most
    assert len(set(asked)) == len(asked) and min(asked) >= 1


def test_bisect_near_the_start_takes_few_tries() -> None:
    asked: list[int] = []
    assert largest.bisect(lambda n: asked.append(n) or n <= 15, 15) == 15
    assert asked == [15, 16]


def test_what_became_of_a_run() -> None:
    good = {"losses": [5.0, 4.0], "step_s": [1.0], "seconds": 2.0}
    refused = {"does_not_fit": "device tier: 1 MiB are missing"}

    def run(said: object = None, code: int = 0, *, killed: bool = False, timed_out: bool = False) -> Limited:
        output = "words\n" + ("" if said is None else json.dumps(said)) + "\n"
        return Limited(code, output, killed, timed_out, peak_bytes=None)

    assert largest.outcome(run(good)) == good
    assert largest.outcome(run(refused)) == refused
    assert largest.outcome(run(code=-9, killed=True)) == {"does_not_fit": "killed at the limit"}
    with pytest.raises(largest.Failed, match="exit code 1"):
        largest.outcome(run(code=1))
    with pytest.raises(largest.Failed, match="exit code -9"):  # by somebody else
        largest.outcome(run(code=-9))
    with pytest.raises(largest.Failed, match="took longer"):
        largest.outcome(run(code=-9, timed_out=True))
    with pytest.raises(largest.Failed, match="losses"):
        largest.outcome(run(good | {"losses": [5.0, float("nan")]}))


def test_what_memwall_refuses_for_want_of_memory() -> None:
    full = PoolFull("device budget exceeded", tier="device", owner=0, missing_bytes=1)
    assert limited.says_it_does_not_fit(full)
    assert limited.says_it_does_not_fit(ConfigError("6.0 MiB (6331392 bytes) are missing. Raise pool.device_budget."))
    assert not limited.says_it_does_not_fit(ConfigError("pool.disk_path=/x is no folder here. Make it."))


def test_without_control_groups_it_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(largest, "why_not", lambda: "control groups need root")
    monkeypatch.setattr(largest, "attempt", lambda *_: pytest.fail("a run without a limit"))
    (row,) = largest.largest(1, tmp_path, "python")
    assert row[2:] == ("not measured", "control groups need root")


def test_rows_of_both_sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    most = {"stock": 3, "memwall": 9}

    def attempt(side: str, layers: int, *_: object) -> dict:
        if layers > most[side]:
            return {"does_not_fit": "killed at the limit"}
        return {"losses": [5.0], "step_s": [0.5], "seconds": 4.0}

    monkeypatch.setattr(largest, "why_not", lambda: None)
    monkeypatch.setattr(largest, "attempt", attempt)
    monkeypatch.setattr(largest, "STARTS", {"stock": 4, "memwall": 4})
    rows = largest.largest(1, tmp_path, str(tmp_path / "python-without"))
    by_name = {name: measured for name, _, measured, _ in rows}
    expected = largest.parameters(9) / largest.parameters(3)
    assert by_name["memwall / stock FSDP2 with AdamW: parameters"] == f"{expected:.2f}"
    assert rows[-1][2] == "not measured" and "--deepspeed-python" in rows[-1][3]
    printed = capsys.readouterr().out
    assert "stock, 4 layers" in printed and "do not fit: killed at the limit" in printed


def test_another_error_ends_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def attempt(*_: object) -> dict:
        raise largest.Failed("Traceback ...\nNameError: x\nexit code 1")

    monkeypatch.setattr(largest, "why_not", lambda: None)
    monkeypatch.setattr(largest, "attempt", attempt)
    with pytest.raises(SystemExit, match=r"(?s)stock broke off, and not for want of memory.*NameError: x"):
        largest.largest(1, tmp_path, "python")


# -- spread, link --


def test_spread_does_not_mix_sizes() -> None:
    times = [1.0] * 95 + [2.0] * 6
    assert memory.spread([(1, t) for t in times]) == pytest.approx(1.0)
    assert memory.spread([(n, n * t) for n in (1, 10) for t in times]) == pytest.approx(1.0)
    assert memory.spread([(1, 1.0)] * 50 + [(2, 7.0)] * 50) == 0.0


def test_a_link_is_scaled_to_the_arithmetic() -> None:
    tokens = 1024
    at_card_speed = 6 * 1000 * tokens / CARD_FLOPS
    rate = scaled_rate(1000, tokens, at_card_speed)
    assert rate == pytest.approx(CARD_LINK_BYTES_PER_S * CARD_TOKENS / tokens)
    assert scaled_rate(1000, tokens, 2 * at_card_speed) == pytest.approx(rate / 2)
    assert scaled_rate(2000, tokens, at_card_speed) == pytest.approx(2 * rate)
    # a step's state takes the same share of the step, whatever the tokens: fewer tokens, faster steps
    assert scaled_rate(1000, 2 * tokens, 2 * at_card_speed) == pytest.approx(rate / 2)


class _Store:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def read(self, pairs: object, after: object = None) -> None:
        self.seen += [placement.bytes for placement, _ in pairs]

    write = read


def test_a_slow_link_takes_what_its_bytes_take() -> None:
    store, link = _Store(), SlowLink(bytes_per_s=1e6)
    link.install(store)
    pairs = [(SimpleNamespace(bytes=1000), None), (SimpleNamespace(bytes=2000), None)]
    others = [threading.Thread(target=store.write, args=(iter(pairs),)) for _ in range(4)]
    for thread in others:
        thread.start()
    store.read(iter(pairs))
    for thread in others:
        thread.join()
    assert store.seen == [1000, 2000] * 5 or sorted(store.seen) == [1000] * 5 + [2000] * 5
    assert link.take() >= 5 * 0.003 and link.take() == 0.0


# -- raw copies beside page-ins --


class _Homes:
    """Homes in one stretch of memory: two fields side by side, one further on."""

    def __init__(self) -> None:
        self.memory = torch.arange(3 * 256, dtype=torch.uint8)
        self.at = {"one": 0, "two": 128, "three": 512}
        self.table, self.stores = self, {Tier.HOST: self}
        self.copies: list[str] = []

    def readable(self, block: Block) -> SimpleNamespace:
        return SimpleNamespace(tier=Tier.HOST, block=block)

    def extent_of(self, home: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(address=self.memory.data_ptr() + self.at[home.block.parameter])

    def copy_in(self, pairs: list, after: object) -> None:
        self.copies.append(pairs[0][0].block.unit)
        for field, slot in pairs:
            at = self.at[field.block.parameter]
            slot.copy_(self.memory[at : at + field.nbytes])


def _pairs(unit: str, slot: torch.Tensor) -> list:
    """Fields of 100 bytes, in a slot on 128 bytes each."""
    fields = [SimpleNamespace(block=Block(unit, name, "exp_avg"), nbytes=100) for name in ("one", "two", "three")]
    return [(field, slot[128 * i : 128 * i + 100]) for i, field in enumerate(fields)]


def test_a_raw_copy_moves_what_a_page_in_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    homes, slot, wanted = _Homes(), torch.zeros(384, dtype=torch.uint8), torch.zeros(384, dtype=torch.uint8)
    homes.copy_in(_pairs("a", wanted), None)
    lengths, real = [], ctypes.memmove
    monkeypatch.setattr(ctypes, "memmove", lambda to, at, n: lengths.append(n) or real(to, at, n))
    raw_copy(homes, _pairs("a", slot))()
    assert lengths == [228, 100], "fields that lie alike in home and slot are one piece"
    for low in (0, 128, 256):
        assert torch.equal(slot[low : low + 100], wanted[low : low + 100])


def test_page_ins_and_raw_copies_take_turns() -> None:
    homes, beside, slot = _Homes(), BesideRaw(), torch.zeros(384, dtype=torch.uint8)
    beside.install(homes)
    noted = []
    for step in range(6):
        beside.measuring = step >= 2
        for unit in "ab":
            homes.copy_in(_pairs(unit, slot), None)
            noted.append((len(beside.page_ins), len(beside.raw)))
    assert homes.copies == list("ab") * 6, "every page-in is made"
    assert noted[3] == (0, 0) and noted[5] == (1, 1) and noted[-1] == (4, 4), "half of the time the one, half the other"
    assert {nbytes for nbytes, _ in beside.page_ins + beside.raw} == {300}


# -- the disk, by itself --


def test_disk_rates_leave_no_file(tmp_path: Path) -> None:
    reads, writes = memory.disk_rates(tmp_path, nbytes=2 * 2**20)
    assert reads > 0 and writes > 0 and not list(tmp_path.iterdir())
