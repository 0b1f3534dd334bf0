"""``memwall-train``: compose and check the run, then train it.

The order of a run: the command line is composed and checked, the text is read into its cache, the run folder and the
checkpoint are settled (no torch so far), the plan is printed, Lightning starts the other ranks by running this command
again, the model is trained, and the summary says what came of it.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from memwall_strategy.core.errors import ConfigError, MemwallError

EXIT_REFUSED = 2
"""Exit code when memwall refused, or a run failed with an error that says what to do."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it: 128 + SIGINT."""

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
        elif flags and set(flags) <= {"-m", "--multirun"}:
            from memwall_strategy.cli.sweep import sweep

            sys.exit(sweep(overrides, own.config_dir, own.config_name))
        elif flags:
            _hand_to_hydra()
        else:
            _run(overrides, own.config_dir, own.config_name)
    except MemwallError as error:
        sys.exit(refuse(error))
    except KeyboardInterrupt:  # before training began
        sys.exit(EXIT_INTERRUPTED)


def refuse(error: MemwallError, command: str = "memwall-train") -> int:
    """Print an error as one paragraph, with the rank where it is not the first; return the exit code."""
    from memwall_strategy.cli.launch import rank

    who = f"{command} [rank {rank()}]" if rank() else command
    print(textwrap.fill(f"{who}: {error}", _MESSAGE_WIDTH, break_long_words=False), file=sys.stderr, flush=True)
    return EXIT_REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("--config-name", default="train")
    return parser


def _run(overrides: Sequence[str], config_dir: Path | None, config_name: str) -> None:
    from memwall_strategy.cli.compose import CONFIG_FOLDER, changes, compose_run
    from memwall_strategy.cli.launch import launch
    from memwall_strategy.cli.settings import check, check_tokenizer, check_vocabulary, find_targets

    settings = check(compose_run(overrides, folder=config_dir or CONFIG_FOLDER, name=config_name))
    find_targets(settings)  # imports what the user named, nothing else
    tokens = None
    if settings.text is not None:
        from memwall_strategy.recipes.text.cache import ensure_tokens  # imports NumPy

        check_tokenizer(settings)  # before text is read in, which may take long
        tokens = ensure_tokens(settings.text)
        check_vocabulary(settings, tokens.meta["vocab"])
    part = launch(settings)
    from memwall_strategy.cli.job import train  # imports torch and Lightning

    try:
        train(settings, part, tokens, changed=changes(overrides))
    except ConfigError:
        part.folder.remove_if_empty()
        raise
    except SystemExit as stop:  # Lightning turns Ctrl-C into an ordinary failure
        if not isinstance(stop.__context__, KeyboardInterrupt):
            raise
        if part.is_first:
            print(f"memwall-train: interrupted. What is there is in {part.folder.path}", file=sys.stderr, flush=True)
        sys.exit(EXIT_INTERRUPTED)


def _hand_to_hydra() -> None:
    """Hydra's own flags, which show something and run nothing: ``--cfg``, ``--info``, ``--hydra-help``."""
    import hydra
    from omegaconf import DictConfig

    from memwall_strategy.cli.compose import CONFIG_FOLDER, CONFIG_NAME
    from memwall_strategy.cli.schema import register

    def job(config: DictConfig) -> None:
        raise ConfigError("This flag of Hydra's starts a run. Leave it out: memwall-train key=value ... starts one.")

    register()
    hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER.resolve()), config_name=CONFIG_NAME)(job)()


if __name__ == "__main__":
    main()
