"""The composed configuration, or one paragraph on why there is none: the key, what is allowed, the nearest match."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

import memwall_strategy
from memwall_strategy.cli.schema import ENTRIES, TARGETS, find_doc, register
from memwall_strategy.core.errors import ConfigError, nearest

CONFIG_FOLDER = Path(memwall_strategy.__file__).parent / "conf"
CONFIG_NAME = "train"
_HYDRA_VERSION = "1.3"


def compose_run(overrides: Sequence[str], *, folder: Path = CONFIG_FOLDER, name: str = CONFIG_NAME) -> DictConfig:
    """Compose a run from the command line's overrides, every interpolation resolved.

    Raises:
        ConfigError: an unknown group, option or value, or an override that cannot be read.
    """
    if not (folder / f"{name}.yaml").is_file():
        raise ConfigError(f"There is no {name}.yaml in {folder}. Correct --config-dir or --config-name.")
    register()
    parsed = parse(overrides)
    with initialize_config_dir(config_dir=str(folder.resolve()), version_base=_HYDRA_VERSION):
        try:
            config = compose(name, overrides=list(overrides))
            _refuse_deletions(parsed, config)
            missing = sorted(OmegaConf.missing_keys(config))
            OmegaConf.resolve(config)
        except MissingConfigException as error:
            raise ConfigError(_missing_config(error, parsed, folder)) from error
        except (ConfigCompositionException, OmegaConfBaseException) as error:
            raise ConfigError(_explain(_cause(error), parsed, folder, name)) from error
        except ValueError as error:  # Hydra's own, of what an override may be
            raise ConfigError(_bad_choice(error, parsed)) from error
    if missing:
        raise ConfigError(f"{missing[0]} has no value. Give it one: {missing[0]}=... {_what_it_is(missing[0])}".strip())
    return config


def sweep_folder(overrides: Sequence[str], *, folder: Path = CONFIG_FOLDER, name: str = CONFIG_NAME) -> Path:
    """Where a sweep with such a job belongs: ``hydra.sweep.dir``."""
    register()
    with initialize_config_dir(config_dir=str(folder.resolve()), version_base=_HYDRA_VERSION):
        config = compose(name, overrides=list(overrides), return_hydra_config=True)
        return Path(config.hydra.sweep.dir).expanduser()


def groups(folder: Path = CONFIG_FOLDER) -> dict[str, list[str]]:
    """Group -> the names that can be chosen for it."""
    return {
        path.name: sorted(option.stem for option in path.glob("*.yaml")) for path in sorted(folder.iterdir())
        if path.is_dir() and any(path.glob("*.yaml"))
    }  # fmt: skip


def parse(overrides: Sequence[str]) -> list[Override]:
    """The command line's overrides.

    Raises:
        ConfigError: one that cannot be read.
    """
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise ConfigError(
            f"The argument {error.override!r} cannot be read. Write key=value, such as trainer.max_steps=100; "
            "put values with spaces, brackets or commas in quotes."
        ) from error
    except HydraException as error:
        raise ConfigError(f"The arguments cannot be read: {error}. Write key=value, one an argument.") from error


def changes(overrides: Sequence[str]) -> list[str]:
    """The overrides that make a run another than its experiment: not where it writes, logs and how it is called."""
    return [
        override.input_line for override in parse(overrides)
        if override.key_or_group.split(".")[0] not in ("experiment", "name", "paths", "logger", "hydra", "resume")
    ]  # fmt: skip


def _cause(error: BaseException) -> BaseException:
    """The innermost error that Hydra or OmegaConf raised and that knows the key, else the innermost."""
    chain = [error]
    while isinstance(chain[-1].__cause__, (HydraException, OmegaConfBaseException)):
        chain.append(chain[-1].__cause__)
    return next((each for each in reversed(chain) if getattr(each, "full_key", None)), chain[-1])


def _refuse_deletions(parsed: list[Override], config: DictConfig) -> None:
    """``~option`` would leave an option to a default that nobody sees; only a class of the user's own may need it."""
    for override in parsed:
        if not override.is_delete():
            continue
        group, _, option = override.key_or_group.partition(".")
        if option and group in TARGETS and OmegaConf.select(config, f"{group}._target_") != TARGETS[group]:
            continue
        raise ConfigError(_deletion(override))


def _deletion(override: Override) -> str:
    key = override.key_or_group
    how = ", null where it may be unset" if "." in key else ", to one of the choices that --help lists"
    return f"{override.input_line} takes away what the run needs. Set it instead ({key}=...){how}."


def _bad_choice(error: ValueError, parsed: list[Override]) -> str:
    known = groups()
    for override in parsed:
        options = known.get(override.key_or_group)
        if options is not None and not isinstance(override.value(), str):
            shown = override.input_line
            return f"{shown}: a group takes the name of a choice. There are: {', '.join(options)}."
    return f"{error} Correct that argument, or see memwall-train --help."


def _misused(parsed: list[Override], config_name: str) -> str | None:
    """What is wrong with an override's form, where Hydra's own words do not say what to write."""
    known = groups()
    for override in parsed:
        key, line = override.key_or_group, override.input_line
        if override.is_sweep_override():
            return f"{line} names several values. Add -m to run one after the other; a list is written key=[a,b]."
        if override.is_add() and key in known and config_name == CONFIG_NAME:
            return f"{line}: {key} is there already. Leave out the +."
        if override.package is not None:
            return f"{line}: a choice belongs to its own group here. Leave out @{override.package}."
    return None


def _missing_config(error: MissingConfigException, parsed: list[Override], folder: Path) -> str:
    known = groups(folder)
    for override in parsed:
        options = known.get(override.key_or_group)
        chosen = override.value()
        if options is not None and chosen is not None and str(chosen) not in options:
            close = nearest(str(chosen), options)
            return f"{override.key_or_group}={chosen} does not exist.{close} There are: {', '.join(options)}."
    return " ".join(str(error).split("Config search path")[0].split())


def _explain(cause: BaseException, parsed: list[Override], folder: Path, name: str) -> str:
    misused = _misused(parsed, name)
    if misused is not None:
        return misused
    key = getattr(cause, "full_key", None) or ""
    text = str(cause).split("\n")[0]
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and key:
        return _unknown_key(key, folder, name)
    if isinstance(cause, ValidationError) and key:
        doc = find_doc(key)
        wanted = f" It must be: {doc.type}." if doc else ""
        given = next((o.get_value_string() for o in parsed if o.key_or_group == key), None)
        shown = f"{key}={given}" if given is not None else key
        return f"{shown} does not fit ({_decapitalize(text)}).{wanted} {_what_it_is(key)}".strip()
    deleted = next((o for o in parsed if o.is_delete()), None)
    if deleted is not None and re.search("delet", text):
        return _unknown_key(deleted.key_or_group, folder, name) if "exist" in text else _deletion(deleted)
    where = f"{key}: " if key else ""
    return f"{where}{text.rstrip('.')}. Correct that argument, or see memwall-train --help."


def _unknown_key(key: str, folder: Path, name: str) -> str:
    """Name the first part of a dotted key that does not exist, what exists beside it, and the nearest option."""
    group, _, entry = key.partition(".")
    if entry in ENTRIES.get(group, {}):
        choice = entry if entry in groups(folder).get(group, []) else "default"
        return f"This run has no {key!r}. Choose a {group} that has it, such as {group}={choice}."
    config = OmegaConf.to_container(compose(name), resolve=False)
    node: object = config
    parent: list[str] = []
    for part in key.split("."):
        if not isinstance(node, dict) or not isinstance(node.get(part), dict):
            break
        node = node[part]
        parent.append(part)
    path = "".join(f"{part}." for part in parent)
    siblings = [f"{path}{k}" for k in node if not k.startswith("_")] if isinstance(node, dict) else []
    everything = [*groups(folder), *_leaves(config)]
    close = nearest(key, siblings) or nearest(key, everything) or _same_name(key.rpartition(".")[2], everything)
    where = f"In {'.'.join(parent)} there are" if parent else "At the top there are"
    return f"There is no option {key!r}.{close} {where}: {', '.join(sorted(siblings))}."


def _leaves(config: object, prefix: str = "") -> Iterator[str]:
    """Every dotted key that holds a value."""
    if not isinstance(config, dict):
        yield prefix.removesuffix(".")
        return
    for key, child in config.items():
        yield from _leaves(child, f"{prefix}{key}.")


def _same_name(name: str, keys: Sequence[str]) -> str:
    """``max_steps`` -> ``trainer.max_steps``: the right name without its group, or in the wrong one."""
    for key in keys:
        if key.rpartition(".")[2] == name:
            return f" Did you mean {key!r}?"
    return ""


def _what_it_is(key: str) -> str:
    doc = find_doc(key)
    return f"{key}: {doc.text}" if doc and doc.text else ""


def _decapitalize(text: str) -> str:
    return re.sub(r"^[A-Z](?=[a-z])", lambda match: match[0].lower(), text)
