"""Configuration: sizes, every field's refusal with option and value named, and building from nested mappings."""

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwall_strategy.config import (
    ClusterConfig,
    MemwallConfig,
    OverlapConfig,
    PoolConfig,
    ResilienceConfig,
    TopologyConfig,
    check_entries,
    config_from,
    format_size,
    parse_size,
)
from memwall_strategy.core.errors import ConfigError

# -- sizes --


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 * 2**20),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("2k", 2000),
        ("2ki", 2048),
        ("3TiB", 3 * 2**40),
        ("100", 100),
        ("100B", 100),
        (" 7 MB ", 7_000_000),
        (0, 0),
        ("0", 0),
        (4096, 4096),
        ("9007199254740993", 9007199254740993),  # above what a float holds exactly
    ],
)
def test_sizes(text, size_bytes):
    assert parse_size(text, option="x") == size_bytes


@pytest.mark.parametrize(("value", "size_bytes"), [(0.9, 900), ("0.9", 900), (1.0, 1000), ("1.0", 1000), (".5", 500)])
def test_fractions_of_what_is_there(value, size_bytes):
    assert parse_size(value, option="x", available_bytes=1000) == size_bytes


@pytest.mark.parametrize(
    "value",
    [
        *("", "MiB", "12 apples", "1e9", "-5MiB", "5 ib", "1,5GB", "0x10", "nan", ".", True, None, [1]),
        *(float("nan"), float("inf"), 0.0, "0.0", -0.5, 1.5, "1.5", -1),
    ],
)
def test_what_is_no_size_is_refused_by_option_and_value(value):
    with pytest.raises(ConfigError) as caught:
        parse_size(value, option="pool.device_budget", available_bytes=10**12)
    assert f"pool.device_budget={value}" in str(caught.value) or f"pool.device_budget={value!r}" in str(caught.value)


def test_a_fraction_of_something_unknown_is_refused():
    with pytest.raises(ConfigError, match=r"x=0\.5 is a fraction of memory whose size is not known"):
        parse_size(0.5, option="x")


def test_more_than_there_is_is_refused():
    with pytest.raises(ConfigError, match=r"x=2\.0 GiB is above the 1\.0 GiB that are there"):
        parse_size("2GiB", option="x", available_bytes=2**30)
    assert parse_size("1GiB", option="x", available_bytes=2**30) == 2**30


@given(st.integers(0, 2**50))
def test_bytes_stay_bytes(size_bytes):
    assert parse_size(size_bytes, option="x") == parse_size(str(size_bytes), option="x") == size_bytes


@given(st.integers(0, 10**6), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_binary_suffixes_are_exact(count, suffix):
    power = ["KiB", "MiB", "GiB", "TiB"].index(suffix) + 1
    assert parse_size(f"{count}{suffix}", option="x") == count * 1024**power


@given(st.floats(0.0, 1.0, exclude_min=True), st.integers(1, 2**50))
def test_a_fraction_never_exceeds_what_is_there(fraction, available_bytes):
    assert 0 <= parse_size(fraction, option="x", available_bytes=available_bytes) <= available_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (-2048, "-2.0 KiB"), (2**42, "4096.0 GiB")],
)
def test_sizes_are_written_for_people(size_bytes, text):
    assert format_size(size_bytes) == text


# -- fields --

REFUSED = [
    (PoolConfig, {"enabled": 1}, "pool.enabled=1"),
    (PoolConfig, {"deep_accounting": "yes"}, "pool.deep_accounting='yes'"),
    (PoolConfig, {"device_budget": "lots"}, "pool.device_budget='lots'"),
    (PoolConfig, {"device_budget": -1}, "pool.device_budget=-1"),
    (PoolConfig, {"device_budget": 1.5}, "pool.device_budget=1.5"),
    (PoolConfig, {"device_budget": "1.5"}, "pool.device_budget=1.5"),
    (PoolConfig, {"device_budget": -0.5}, "pool.device_budget=-0.5"),
    (PoolConfig, {"device_budget": 0.0}, "pool.device_budget=0.0"),
    (PoolConfig, {"device_budget": "0.0"}, "pool.device_budget=0.0"),
    (PoolConfig, {"device_budget": True}, "pool.device_budget=True"),
    (OverlapConfig, {"lanes": None}, "overlap.lanes=None"),
    (OverlapConfig, {"trace": "false"}, "overlap.trace='false'"),
    (OverlapConfig, {"prefetch": -1}, "overlap.prefetch=-1"),
    (OverlapConfig, {"prefetch": 1.0}, "overlap.prefetch=1.0"),
    (OverlapConfig, {"prefetch": True}, "overlap.prefetch=True"),
    (OverlapConfig, {"reduce_buffers": 0}, "overlap.reduce_buffers=0"),
    (TopologyConfig, {"enabled": True}, "topology.enabled=true"),
    (TopologyConfig, {"enabled": "no"}, "topology.enabled='no'"),
    (ClusterConfig, {"enabled": True}, "cluster.enabled=true"),
    (ResilienceConfig, {"enabled": 0}, "resilience.enabled=0"),
    (ResilienceConfig, {"swappable_groups": "auto"}, "resilience.swappable_groups='auto'"),
    (MemwallConfig, {"replicate": 0}, "replicate=0"),
    (MemwallConfig, {"replicate": "2"}, "replicate='2'"),
    (MemwallConfig, {"accumulate": "shard"}, "accumulate='shard'"),
    (MemwallConfig, {"accumulate": ["whole"]}, "accumulate=['whole']"),
    (MemwallConfig, {"checkpoint": "fulll"}, "checkpoint='fulll'"),
    (MemwallConfig, {"async_checkpoint": 1}, "async_checkpoint=1"),
    (MemwallConfig, {"async_checkpoint": True, "checkpoint": "full"}, "async_checkpoint=true"),
    (MemwallConfig, {"unit_classes": "Block"}, "unit_classes='Block'"),
    (MemwallConfig, {"unit_classes": 3}, "unit_classes=3"),
    (MemwallConfig, {"timeout_s": 0}, "timeout_s=0"),
    (MemwallConfig, {"timeout_s": "60"}, "timeout_s='60'"),
    (MemwallConfig, {"timeout_s": True}, "timeout_s=True"),
    (MemwallConfig, {"timeout_s": float("nan")}, "timeout_s=nan"),
    (MemwallConfig, {"timeout_s": float("inf")}, "timeout_s=inf"),
    (MemwallConfig, {"pool": OverlapConfig()}, "pool=OverlapConfig("),
    (MemwallConfig, {"pool": PoolConfig}, "pool=<class"),
    (MemwallConfig, {"overlap": {"lanes": True}}, "overlap={'lanes': True}"),
]


@pytest.mark.parametrize(("kind", "options", "named"), REFUSED, ids=[named for *_, named in REFUSED])
def test_a_bad_value_is_refused_by_option_and_value(kind, options, named):
    with pytest.raises(ConfigError) as caught:
        kind(**options)
    assert named in str(caught.value)


def test_a_misspelled_choice_is_hinted_at():
    with pytest.raises(ConfigError, match="Did you mean 'sharded'"):
        MemwallConfig(accumulate="shraded")


@pytest.mark.parametrize("budget", ["512MiB", 123, 0.9, "0.9", 1.0, "1.0", "1", None])
def test_budgets_that_can_be(budget):
    assert PoolConfig(device_budget=budget).device_budget == budget


def test_configurations_cannot_change():
    with pytest.raises(AttributeError):
        MemwallConfig().replicate = 2
    with pytest.raises(AttributeError):
        PoolConfig().enabled = False


def test_unit_classes_may_be_classes_or_names():
    class Block:
        pass

    assert MemwallConfig(unit_classes=(Block, "Layer")).unit_classes == ("Block", "Layer")
    assert MemwallConfig(unit_classes=["Layer"]).unit_classes == ("Layer",)
    assert hash(MemwallConfig(unit_classes=["Layer"])) == hash(MemwallConfig(unit_classes=("Layer",)))


# -- from mappings --


def test_nested_mappings_become_parts():
    config = config_from(
        {"overlap": {"prefetch": 3, "trace": True}, "pool": PoolConfig(device_budget="1GiB"), "unit_classes": ["Block"]}
    )
    assert config == MemwallConfig(
        overlap=OverlapConfig(prefetch=3, trace=True), pool=PoolConfig(device_budget="1GiB"), unit_classes=("Block",)
    )


def test_no_options_are_the_defaults():
    assert config_from({}) == MemwallConfig()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 2}, r"MemwallStrategy has no option 'replicas'\. Did you mean 'replicate'\?"),
        ({"overlap": {"prefech": 1}}, r"OverlapConfig has no option 'prefech'\. Did you mean 'prefetch'\?"),
        ({"zebra": 1}, r"MemwallStrategy has no option 'zebra'\. Known options: accumulate, async_checkpoint"),
        ({"overlap": 3}, "overlap=3 must be a OverlapConfig or a mapping"),
        ({"overlap": None}, "overlap=None must be"),
        ({"overlap": {"prefetch": -1}}, r"overlap\.prefetch=-1"),
    ],
)
def test_unknown_options_and_bad_parts_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        config_from(options)


def test_the_owner_is_named():
    with pytest.raises(ConfigError, match="MemwallPlugin has no option 'x'"):
        config_from({"x": 1}, owner="MemwallPlugin")


def test_neither_torch_nor_lightning_is_imported():
    code = (
        "import sys, memwall_strategy, memwall_strategy.config, memwall_strategy.core.errors as e;"
        "memwall_strategy.MemwallConfig; memwall_strategy.ConfigError;"
        "print([m for m in ('torch', 'lightning', 'pytorch_lightning', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_misspelt_keyword_of_a_part_is_named_with_the_nearest_option() -> None:
    with pytest.raises(ConfigError, match=r"PoolConfig has no option 'device_budgt'\. Did you mean 'device_budget'"):
        PoolConfig(device_budgt="1GiB")
    assert PoolConfig(device_budget="1GiB").device_budget == "1GiB"


def test_budgets_by_rank():
    pool = PoolConfig(device_budget=["1GiB", 0.5], host_budget=(1, 2), disk_budget=[0, 0])
    assert pool.device_budget == ("1GiB", 0.5) and hash(pool)
    check_entries(pool, 2)
    for world in (1, 3):
        with pytest.raises(ConfigError, match=rf"pool\.device_budget=.* has 2 entries for {world} ranks"):
            check_entries(pool, world)
    for options, text in (
        ({"device_budget": []}, r"pool\.device_budget=\[\] is a list without an entry"),
        ({"device_budget": ["1GiB", "lots"]}, r"pool\.device_budget='lots' is not a size"),
        ({"host_budget": [1, [2]]}, r"pool\.host_budget=\[2\] is not a size"),
        ({"disk_budget": [0, "1GiB"]}, r"pool\.disk_budget=.* says how much, not where"),
        ({"reserve": "1MiB"}, r"pool\.reserve='1MiB' is a part of pool\.device_budget, which is not set"),
        ({"reserve": 1.5, "device_budget": "1GiB"}, r"pool\.reserve=1\.5 is a fraction outside"),
    ):
        with pytest.raises(ConfigError, match=text):
            PoolConfig(**options)
    made = config_from({"pool": {"device_budget": [1, 2], "reserve": 0.1}})
    assert made.pool.device_budget == (1, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shared_memory": "always"}, "overlap.shared_memory='always' must be auto, true or false"),
        ({"shared_memory": None}, "overlap.shared_memory=None must be auto, true or false"),
        ({"shared_memory": 1}, "overlap.shared_memory=1 must be auto, true or false"),
        ({"shared_memory": True, "lanes": False}, "overlap.shared_memory=true works on the lanes"),
        ({"non_dumpable": "yes"}, "overlap.non_dumpable='yes' must be true or false"),
    ],
)
def test_shared_memory_options_are_checked(options, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        OverlapConfig(**options)
    assert OverlapConfig().shared_memory == "auto" and OverlapConfig(shared_memory=True, enabled=False, lanes=False)
