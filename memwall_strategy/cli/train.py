"""``memwall-train``: compose and check the run, then train it.

The order of a run: the command line is composed and checked, the text is read into its cache, the run folder and the
checkpoint are settled (no torch so far), the plan is printed, Lightning starts the other ranks by running this command
again, the model is trained, and the summary says what came of it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from memwall_strategy.core.errors import ConfigError, MemwallError

EXIT_REFUSED = 2
"""Exit code when memwall refused, or a run failed with an error that says what to do."""

_MESSAGE_WIDTH = 110


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    own, rest = _parser().parse_known_args(sys.argv[1:] if arguments is None else arguments)
    overrides = [argument for argument in rest if not argument.startswith("-")]
    flags = [argument for argument in rest if argument.startswith("-")]
    try:
        if own.help:
            from memwall_strategy.cli.help import help_text

            print(help_text(overrides))
        elif flags:
            _hand_to_hydra()
        else:
            _run(overrides, own.config_dir, own.config_name)
    except MemwallError as error:
        sys.exit(refuse(error))


def refuse(error: MemwallError) -> int:
    """Print an error as one paragraph, with the rank where it is not the first; return the exit code."""
    from memwall_strategy.cli.launch import rank

    who = f"memwall-train [rank {rank()}]" if rank() else "memwall-train"
    print(textwrap.fill(f"{who}: {error}", _MESSAGE_WIDTH, break_long_words=False), file=sys.stderr, flush=True)
    return EXIT_REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("--config-name", default="train")
    return parser


def _run(overrides: Sequence[str], config_dir: Path | None, config_name: str) -> None:
    from memwall_strategy.cli.compose import CONFIG_FOLDER, compose_run
    from memwall_strategy.cli.launch import launch
    from memwall_strategy.cli.settings import check

    settings = check(compose_run(overrides, folder=config_dir or CONFIG_FOLDER, name=config_name))
    tokens = None
    if settings.text is not None:
        from memwall_strategy.recipes.text.cache import ensure_tokens  # imports NumPy

        tokens = ensure_tokens(settings.text)
    part = launch(settings)
    from memwall_strategy.cli.job import train  # imports torch and Lightning

    try:
        train(settings, part, tokens)
    except ConfigError:
        part.folder.remove_if_empty()
        raise


def _hand_to_hydra() -> None:
    """Sweeps (``-m``) and Hydra's own flags. A job of a sweep is a command of its own, so none can harm the next."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import CompactHydraException
    from omegaconf import DictConfig

    from memwall_strategy.cli.compose import CONFIG_FOLDER, CONFIG_NAME
    from memwall_strategy.cli.schema import register

    def job(config: DictConfig) -> None:
        given = HydraConfig.get()
        folder = f"paths.run_folder={given.runtime.output_dir}"
        command = [sys.executable, "-m", "memwall_strategy.cli.train", *given.overrides.task, folder]
        code = subprocess.run(command, check=False, env=dict(os.environ)).returncode
        if code:
            raise CompactHydraException(f"Job {given.job.num} ended with exit code {code}; its output is above.")

    register()
    hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER.resolve()), config_name=CONFIG_NAME)(job)()


if __name__ == "__main__":
    main()
