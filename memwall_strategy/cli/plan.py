"""``memwall-plan``: will it fit, and what is the least time of a step, from the same overrides as ``memwall-train``.

The model is built on the meta device; no process, no card and no run folder is touched.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from memwall_strategy.cli.train import refuse
from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.planner import Plan  # imports no torch

EXIT_TOO_BIG = 1
"""Exit code when the plan does not fit."""

_EPILOG = "Groups and options are those of memwall-train: memwall-train --help lists them."


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; ends with 0 when the run fits, 1 when it does not, 2 when the arguments are refused."""
    parser = argparse.ArgumentParser("memwall-plan", description=__doc__.splitlines()[0], epilog=_EPILOG)
    parser.add_argument("overrides", nargs="*", help="group=name or key=value, such as experiment=gpt_1b3")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON instead of a table")
    parser.add_argument("--config-dir", type=Path, help="folder of the configuration, such as a run folder")
    parser.add_argument("--config-name", default="train", help="name of the configuration in it")
    given = parser.parse_intermixed_args(sys.argv[1:] if arguments is None else arguments)
    try:
        made = make_plan(given.overrides, given.config_dir, given.config_name)
    except MemwallError as error:
        sys.exit(refuse(error, "memwall-plan"))
    print(made.to_json() if given.json else made.table())
    sys.exit(EXIT_TOO_BIG if made.fits is False else 0)


def make_plan(overrides: Sequence[str], config_dir: Path | None = None, config_name: str = "train") -> Plan:
    """The plan of the run that these overrides mean.

    Raises:
        ConfigError: a mistake in them, or a number of ranks that is only known on another machine.
    """
    from memwall_strategy.cli.compose import CONFIG_FOLDER, compose_run
    from memwall_strategy.cli.settings import check, find_targets

    settings = check(compose_run(overrides, folder=config_dir or CONFIG_FOLDER, name=config_name))
    find_targets(settings)
    import torch

    from memwall_strategy.cli.job import build_module
    from memwall_strategy.cli.launch import share_machine
    from memwall_strategy.cli.planning import plan_run

    trainer, hardware = settings.trainer, settings.hardware
    accelerator = {"gpu": "cuda"}.get(trainer.accelerator, trainer.accelerator)
    kind = hardware.device or accelerator
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and hardware.device_memory is None and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.accelerator=cuda: there is no CUDA device here whose memory could be planned with. Describe one: "
            "hardware=h100_80g, or hardware.device_memory=80GiB."
        )
    if not isinstance(trainer.devices, int):
        described = hardware.devices_per_machine
        found = described or (torch.cuda.device_count() if kind == "cuda" else 1)
        settings = settings.with_devices(found)
    saved = os.environ.get("LOCAL_WORLD_SIZE")
    share_machine(settings)
    module, optimizer = build_module(settings)
    try:
        return plan_run(settings, module, optimizer, settings.trainer.devices * trainer.num_nodes, torch.device(kind))
    finally:
        if saved is None:
            os.environ.pop("LOCAL_WORLD_SIZE", None)


if __name__ == "__main__":
    main()
