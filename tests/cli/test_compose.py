"""The composed configuration, and what is said when there is none. No torch, no process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from memwall_strategy.cli.compose import CONFIG_FOLDER, changes, compose_run, groups
from memwall_strategy.cli.schema import GROUPS, option_docs, type_name
from memwall_strategy.cli.settings import check, find_targets
from memwall_strategy.config import MemwallConfig, PoolConfig
from memwall_strategy.core.errors import ConfigError
from tests.ranks import ROOT


def test_defaults_are_those_of_the_dataclasses() -> None:
    settings = check(compose_run([]))
    assert settings.memwall == MemwallConfig()
    assert settings.trainer.max_epochs == 1 and settings.run.ckpt_path is None
    assert settings.model.context == settings.text.seq_len == 256


def test_an_experiment_and_overrides_reach_every_part() -> None:
    settings = check(
        compose_run(
            [
                "experiment=gpt_nano", "pool.device_budget=512MiB", "overlap=off", "strategy.replicate=2",
                "strategy.unit_classes=[Block]", "data.seq_len=128", "optimizer=sgd", "trainer.max_steps=7",
                "data.files=[a.txt,'docs/**/*.md']", "paths.cache_dir=/somewhere",
            ]
        )
    )  # fmt: skip
    assert settings.memwall == MemwallConfig(
        pool=PoolConfig(device_budget="512MiB"), overlap=settings.memwall.overlap, replicate=2, unit_classes=("Block",)
    )
    assert not settings.memwall.overlap.enabled
    assert settings.model.context == 128 and settings.text.cache_dir == "/somewhere"
    assert settings.text.files == ("a.txt", "docs/**/*.md")
    assert settings.plain["data"]["files"] == [str(Path.cwd() / name) for name in settings.text.files]
    assert (settings.trainer.devices, settings.trainer.accelerator, settings.trainer.max_steps) == (2, "cpu", 7)
    assert settings.plain["optimizer"]["_target_"] == "torch.optim.SGD"
    assert [claim.figure for claim in settings.run.claims] == ["run/wall_s", "input/exposed_share", "train/loss_ratio"]


@pytest.mark.parametrize("budget", ["0.5", "1073741824", "8GiB", "null"])
def test_sizes_keep_their_type(budget: str) -> None:
    value = check(compose_run([f"pool.device_budget={budget}"])).memwall.pool.device_budget
    assert value == {"0.5": 0.5, "1073741824": 2**30, "8GiB": "8GiB", "null": None}[budget]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "pool.device_bugdet=1",
            r"no option 'pool\.device_bugdet'\. Did you mean 'pool\.device_budget'\? In pool there",
        ),
        ("optimiser=adamw", r"no option 'optimiser'\. Did you mean 'optimizer'\?"),
        ("sed=1", r"no option 'sed'\. Did you mean 'seed'\?"),
        ("max_steps=3", r"no option 'max_steps'\. Did you mean 'trainer\.max_steps'\?"),
        ("optimizer=adam", r"optimizer=adam does not exist\. Did you mean 'adamw'\? There are: adamw, sgd"),
        ("experiment=gpt_nan", r"experiment=gpt_nan does not exist\. Did you mean 'gpt_nano'\?"),
        (
            "optimizer.lr=abc",
            r"optimizer\.lr=abc does not fit .*It must be: number\. optimizer\.lr: Peak learning rate",
        ),
        ("pool.enabled=maybe", r"pool\.enabled=maybe does not fit .*true or false"),
        ("trainer.devices=0.5", r"trainer\.devices=0\.5 does not fit .*whole number or text"),
        ("seed=[", r"argument 'seed=\[' cannot be read\. Write key=value"),
        ("trainer.devices", r"argument 'trainer\.devices' cannot be read"),
        ("model.context=${nowhere}", r"model\.context: Interpolation key 'nowhere' not found"),
        ("name=???", r"name has no value\. Give it one: name="),
        ("+pool.speed=1", r"no option 'speed'|has no option 'speed'"),
        ("++color=red", r"no option 'color'"),
        ("+data.shufle=true", r"no option 'data\.shufle'\. Did you mean 'data\.shuffle'\?"),
        ("model=gpt_nanoo", r"model=gpt_nanoo does not exist\. Did you mean 'gpt_nano'\?"),
        ("debug=profile", r"debug=profile does not exist\. Did you mean 'profiler'\?"),
        ("hardware=h2000", r"hardware=h2000 does not exist\. Did you mean 'h200'\?"),
        ("model=null", r"model=null: a group takes the name of a choice\. There are: gpt2_124m"),
        ("+model=gpt_nano", r"model is there already\. Leave out the \+"),
        ("~model", r"~model: a group takes the name of a choice"),
        ("~modl", r"no option 'modl'\. Did you mean 'model'\?"),
        ("~optimizer.lr", r"~optimizer\.lr takes away what the run needs\. Set it instead \(optimizer\.lr="),
        ("~model.heads", r"~model\.heads takes away"),
        ("optimizer.lr=1,2", r"optimizer\.lr=1,2 names several values\. Add -m"),
        ("trainer=cpu,default", r"trainer=cpu,default names several values\. Add -m"),
        ("model@foo=gpt_nano", r"Leave out @foo"),
        ("data.files=a.txt", r"data\.files=a\.txt does not fit .*It must be: list of text"),
        ("data=hf", r"data\.dataset has no value\. Give it one: data\.dataset=\.\.\. data\.dataset: Folder"),
        ("data.encoding=utf9", r"data\.encoding='utf9' is not an encoding"),
        ("model._target_=no_such_package.Thing", r"model\._target_=.*no package 'no_such_package'"),
        ("trainer.devices=0", r"trainer\.devices=0 must be a whole number of at least 1"),
        ("trainer.devices=two", r"trainer\.devices='two' must be a whole number of at least 1, or auto"),
        ("trainer.precision=fp16", r"trainer\.precision='fp16' is not one of 32-true"),
        ("trainer.max_epochs=-1", r"Nothing says when the run ends"),
        ("trainer.gradient_clip_val=0", r"trainer\.gradient_clip_val=0\.0 must be above 0"),
        ("trainer.limit_val_batches=1.5", r"trainer\.limit_val_batches=1\.5"),
        ("pool.device_budget=lots", r"pool\.device_budget='lots' is not a size"),
        ("model.heads=3", r"model\.hidden=256 is not divisible by model\.heads=3"),
        ("model.context=100", r"data\.seq_len=256 is longer than model\.context=100"),
        ("model.vocab=256", r"model\.vocab=256 is too small"),
        ("checkpoints.every_n_steps=0", r"checkpoints\.every_n_steps=0"),
        ("name=a/b", r"name='a/b' must be a folder's name"),
    ],
)
def test_a_mistake_names_the_option_and_the_remedy(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(compose_run([override]))
    assert "\n" not in str(caught.value)


def test_replicas_must_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.replicate=2 does not divide the 3 ranks"):
        check(compose_run(["trainer.devices=3", "strategy.replicate=2"]))


@pytest.mark.parametrize("experiment", ["gpt_nano", "gpt2_124m", "gpt_1b3"])
@pytest.mark.parametrize("debug", ["fdr", "overfit", "profiler"])
def test_every_experiment_composes_with_every_debug(experiment: str, debug: str) -> None:
    settings = check(compose_run([f"experiment={experiment}", f"debug={debug}"]))
    assert settings.run.name == experiment and 1 < settings.trainer.max_steps <= 200
    assert not settings.run.checkpoints.enabled
    assert settings.memwall.overlap.trace is (debug == "profiler")
    assert settings.text.shuffle is (debug != "overfit")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer._target_=torch.optim.AdamWW", r"torch\.optim has no 'AdamWW'\. Did you mean 'AdamW'\?"),
        ("optimizer._target_=torch.optm.AdamW", r"optimizer\._target_=.*No module named 'torch\.optm'"),
    ],
)
def test_a_target_that_is_not_there(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_targets(check(compose_run([override])))


def test_a_model_of_the_users_own_is_left_to_itself() -> None:
    settings = check(compose_run(["model._target_=torch.nn.Linear", "+model.in_features=3"]))
    assert settings.model is None and settings.plain["model"]["in_features"] == 3


def test_a_saved_configuration_composes_to_itself(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    first = check(compose_run(["experiment=gpt_nano", "seed=5", "pool.device_budget=0.25"]))
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(first.plain))
    again = check(compose_run(["seed=6"], folder=tmp_path, name="config"))
    assert again.plain == {**first.plain, "seed": 6}
    assert again.memwall == first.memwall
    with pytest.raises(ConfigError, match=r"model=gpt_1b3: this configuration holds the options of model themselves"):
        check(compose_run(["model=gpt_1b3"], folder=tmp_path, name="config"))
    with pytest.raises(ConfigError, match=r"no option 'trainer\.max_step'\. Did you mean 'trainer\.max_steps'"):
        compose_run(["trainer.max_step=1"], folder=tmp_path, name="config")


def test_every_group_has_a_folder_a_first_line_and_documented_options() -> None:
    assert set(groups()) == {*GROUPS, "experiment", "hydra", "debug"}
    for group, names in groups().items():
        for name in names:
            first = (CONFIG_FOLDER / group / f"{name}.yaml").read_text().splitlines()
            comments = [line for line in first if line.startswith("# ") and "@package" not in line]
            assert comments and comments[0].endswith("."), (group, name)
    undocumented = [
        f"{group}.{doc.name}" for group, classes in GROUPS.items() for cls in classes for doc in option_docs(cls)
        if not doc.text
    ]  # fmt: skip
    assert undocumented == []


def test_types_in_words() -> None:
    assert type_name(int | float | None) == "whole number or number or null"
    assert type_name(tuple[str, ...]) == "list of text"


def test_neither_torch_nor_lightning_is_imported_for_help_or_a_mistake(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    code = """
import sys
from memwall_strategy.cli.train import main
cache = "paths.cache_dir=" + sys.argv[1]
for arguments in (["--help"], ["pool.device_bugdet=1"], ["model.heads=3"], ["ckpt_path=/nowhere"], ["data.seq_len=0"],
                  ["data.files=[" + sys.argv[2] + "]", cache], ["data.files=[/dev/null]", cache], ["-m", "seed=a,b"]):
    sys.argv = ["memwall-train", *arguments]
    try:
        main()
        print("ended", 0)
    except SystemExit as end:
        print("ended", end.code)
print("heavy:", sorted(name for name in sys.modules if name in ("torch", "lightning")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(empty)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^ended (\d)", done.stdout, re.M) == ["0", "2", "2", "2", "2", "2", "2", "2"]
    assert "heavy: []" in done.stdout
    assert "pool.device_budget=null" in done.stdout and "trainer.max_steps" in done.stdout
    assert "zero tokens" in done.stderr and "/dev/null is a device" in done.stderr and "Traceback" not in done.stderr


def test_what_makes_a_run_another_than_its_experiment() -> None:
    told = changes(["experiment=gpt_nano", "trainer.max_steps=5", "name=mine", "paths.runs=here", "optimizer=sgd"])
    assert told == ["trainer.max_steps=5", "optimizer=sgd"]
