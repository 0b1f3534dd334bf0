"""The groups ``logger`` and ``callbacks``: what they compose to, and what is said of a mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memwall_strategy.cli.compose import compose_run
from memwall_strategy.cli.help import help_text
from memwall_strategy.cli.settings import check
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.telemetry.options import TelemetryConfig
from tests.cli.test_train import TINY, memwall_train
from tests.ranks import ROOT


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [("csv", set()), ("wandb", {"wandb"}), ("tensorboard", {"tensorboard"}), ("many", {"wandb", "tensorboard"})],
)
def test_loggers(choice: str, wanted: set[str]) -> None:
    plain = check(compose_run([f"logger={choice}"])).plain
    assert set(plain["logger"]) == wanted
    if "wandb" in wanted:
        assert plain["logger"]["wandb"]["mode"] == "offline", "unless asked"
        assert check(compose_run([f"logger={choice}", "logger.wandb.mode=online"])).plain["logger"]["wandb"]["mode"]


def test_callbacks() -> None:
    default = check(compose_run([])).plain["callbacks"]
    assert set(default) == {"telemetry", "progress"}
    assert {k: v for k, v in default["telemetry"].items() if k != "_target_"} == {
        name: getattr(TelemetryConfig(), name) for name in TelemetryConfig.__dataclass_fields__
    }
    assert check(compose_run(["callbacks=none"])).plain["callbacks"] == {}
    profile = check(compose_run(["callbacks=profile", "callbacks.telemetry.profile_steps=2"])).plain["callbacks"]
    assert profile["telemetry"]["profile"] is True and profile["telemetry"]["profile_steps"] == 2
    progress = check(compose_run(["progress_every_n_steps=7"])).plain["callbacks"]["progress"]
    assert progress["every_n_steps"] == 7
    mine = check(compose_run(["+callbacks.mine._target_=a.B", "+callbacks.mine.x=1"])).plain["callbacks"]["mine"]
    assert mine == {"_target_": "a.B", "x": 1}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["logger=wand"], r"logger=wand does not exist\. Did you mean 'wandb'\?"),
        (["logger=wandb", "logger.wandb.mode=onlin"], r"logger\.wandb\.mode='onlin' is not one of offline, online"),
        (["logger.wandb.mode=online"], r"no 'logger\.wandb'\. Choose a logger .* logger=wandb"),
        (["callbacks=none", "callbacks.telemetry.profile=true"], r"no 'callbacks\.telemetry'\. .* callbacks=default"),
        (["callbacks.telemetry.profil=true"], r"'callbacks\.telemetry\.profil'\. Did you mean .*\.profile'\?"),
        (["callbacks.telemetry.memory_alert=2"], r"telemetry\.memory_alert=2\.0 must be a share"),
        (["callbacks.telemetry.profile_steps=x"], r"must be: whole number\. .*Steps in the profile"),
        (["callbacks.progress.every_n_steps=0"], r"progress\.every_n_steps=0 must be a whole number"),
        (["+logger.mine=3"], r"logger\.mine=3 says no class\. Write '\+logger\.mine\._target_="),
        (["+callbacks.mine.x=3"], r"callbacks\.mine=.* says no class"),
    ],
)
def test_mistakes(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(compose_run(overrides))
    assert "\n" not in str(caught.value)


def test_help_names_the_options_of_what_is_chosen() -> None:
    shown = help_text(["logger=wandb"])
    assert "logger.wandb.mode=offline" in shown and "callbacks.telemetry.memory_alert=0.95" in shown
    assert "logger=many" in shown and "callbacks=none" in shown
    assert "logger.wandb.mode=offline" not in help_text([])


@pytest.mark.parametrize(
    ("logger", "hidden"), [("wandb", "wandb"), ("tensorboard", "tensorboard,tensorboardX")]
)
def test_a_logger_whose_package_is_missing_is_refused(tmp_path: Path, logger: str, hidden: str) -> None:
    """Before any rank exists, with the package named, and no run folder is left."""
    code = """
import importlib.metadata, importlib.util, sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
distribution, find = importlib.metadata.distribution, importlib.util.find_spec
def no_distribution(name):
    if name in sys.argv[1].split(","): raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)
importlib.metadata.distribution = no_distribution
from memwall_strategy.cli.train import main
main(sys.argv[2:])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, hidden, *TINY, f"logger={logger}", f"paths.root={tmp_path}/runs",
         f"paths.cache_dir={tmp_path}/cache"],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot be built" in done.stderr and hidden.split(",")[0] in done.stderr, done.stderr
    assert not [*tmp_path.glob("runs/*/*")]


def test_many_loggers_and_a_profile_at_once(tmp_path: Path) -> None:
    done = memwall_train(
        tmp_path, "logger=many", "callbacks=profile", "trainer.max_steps=7", "checkpoints.enabled=false",
        "trainer.limit_val_batches=0", f"paths.run_folder={tmp_path}/run",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {"config.yaml", "events.jsonl", "metrics.csv", "plan.json", "summary.json", "tensorboard",
                     "profile.json", "wandb"}  # fmt: skip
    assert [*(tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*")]
    assert [*(tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")]
    assert "wandb sync" in done.stdout and "\r" not in done.stdout and "\x1b" not in done.stdout
