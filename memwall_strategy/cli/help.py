"""``memwall-train --help``: how to use it, every group with its choices, every option with its value and meaning."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from memwall_strategy.cli import options as cli
from memwall_strategy.cli.compose import CONFIG_FOLDER, compose_run, groups
from memwall_strategy.cli.schema import ENTRIES, GROUPS, STRATEGY_FIELDS, OptionDoc, option_docs

_WIDTH = 118
_NAME_WIDTH = 36

_NONE = re.compile(r"\bNone\b")

_USAGE = """\
memwall-train trains a recipe and leaves one run folder.

  memwall-train experiment=gpt_nano                        a small GPT on real text, two local processes, < 3 minutes
  memwall-train experiment=gpt_nano trainer.max_steps=50   any option below can be set: key=value
  memwall-train experiment=gpt_nano ckpt_path=last         go on from the newest whole checkpoint of such runs
  memwall-train -m optimizer.lr=1e-3,2e-3                  a sweep: one run after the other
  memwall-train experiment=gpt_nano --help                 this text, with that experiment's values
  memwall-train experiment=gpt_nano --cfg job              the composed configuration; --hydra-help: Hydra's own flags
"""


def help_text(overrides: Sequence[str] = ()) -> str:
    """The help, with the values that these overrides give."""
    plain = OmegaConf.to_container(compose_run(overrides), resolve=True)
    lines = [_USAGE, "Groups (choose with group=name):"]
    for group, names in groups().items():
        for name in names:
            lines.append(_entry(f"{group}={name}", _first_comment(group, name)))
    lines += ["", "Options (value now, then meaning):"]
    top = {name: value for name, value in plain.items() if name not in GROUPS}
    lines += _section("", option_docs(cli.TrainOptions, _simple(cli.TrainOptions)), top)
    lines += _section("checkpoints.", option_docs(cli.CheckpointsOptions), plain["checkpoints"])
    for group, classes in GROUPS.items():
        if group in ENTRIES:
            lines += _entries(group, plain[group])
            continue
        cls = max(classes, key=lambda c: len({f.name for f in dataclasses.fields(c)} & set(plain[group])))
        only = STRATEGY_FIELDS if group == "strategy" else None
        lines += ["", f"{group}: {(cls.__doc__ or '').splitlines()[0]}"]
        lines += _section(f"{group}.", option_docs(cls, only), plain[group])
    return "\n".join(lines)


def _entries(group: str, nodes: dict[str, Any]) -> list[str]:
    """Options of the loggers or callbacks that this run has."""
    lines: list[str] = []
    for name, (cls, _) in ENTRIES[group].items():
        if name in nodes:
            lines += ["", f"{group}.{name}: {(cls.__doc__ or '').splitlines()[0]}"]
            lines += _section(f"{group}.{name}.", option_docs(cls), nodes[name])
    return lines


def _simple(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls) if f.name not in ("checkpoints", "claims"))


def _section(prefix: str, docs: Sequence[OptionDoc], values: dict[str, Any]) -> list[str]:
    return [_entry(f"{prefix}{doc.name}={_shown(values.get(doc.name))}", doc.text) for doc in docs]


def _entry(name: str, text: str) -> str:
    body = textwrap.wrap(_NONE.sub("null", text).replace("``", ""), _WIDTH - _NAME_WIDTH - 2) or [""]
    head = f"  {name:<{_NAME_WIDTH - 2}}"
    if len(head) > _NAME_WIDTH:
        return "\n".join([head.rstrip(), *(" " * (_NAME_WIDTH + 2) + line for line in body)])
    return "\n".join([f"{head}  {body[0]}", *(" " * (_NAME_WIDTH + 2) + line for line in body[1:])]).rstrip()


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)


def _first_comment(group: str, name: str) -> str:
    for line in (CONFIG_FOLDER / group / f"{name}.yaml").read_text().splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.removeprefix("#").strip()
    return ""
