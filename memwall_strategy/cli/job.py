"""One run from checked settings: text, model, plan, training, summary. Here torch and Lightning are imported."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import lightning.pytorch as L
import psutil
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from rich.console import Console

from memwall_strategy.cli.checkpoints import checkpoint_callbacks
from memwall_strategy.cli.launch import Launch
from memwall_strategy.cli.planning import peak_flops, plan_run
from memwall_strategy.cli.report import print_summary
from memwall_strategy.cli.run_callbacks import DescribedPeak, TraceFile
from memwall_strategy.cli.schema import ENTRIES
from memwall_strategy.cli.settings import Settings
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.lightning import MemwallStrategy
from memwall_strategy.planner import Plan
from memwall_strategy.recipes.text.cache import TokenFiles
from memwall_strategy.telemetry.callback import TelemetryMethods
from memwall_strategy.telemetry.csv_log import read_csv
from memwall_strategy.telemetry.progress import run_console
from memwall_strategy.telemetry.run_log import StartedLogger, run_log_class
from memwall_strategy.telemetry.summary import environment, hold_claims, run_figures


def train(
    settings: Settings, part: Launch, tokens: TokenFiles | None, changed: Sequence[str] = ()
) -> dict[str, float]:
    """Train, and return the run's figures (empty on ranks other than the first).

    Args:
        changed: overrides that make this run another than its experiment; told beside the claims.

    Raises:
        ConfigError: found here, before any process starts, what needs torch to be found.
    """
    _quiet()
    console = run_console()
    L.seed_everything(settings.run.seed, workers=True, verbose=False)
    plain = settings.plain
    module, tried = build_module(settings)
    data = _make("data", plain["data"])
    callbacks = [_make(f"callbacks.{name}", node) for name, node in plain["callbacks"].items()]
    telemetry = next((each for each in callbacks if isinstance(each, TelemetryMethods)), None)
    loggers = _loggers(settings, part)
    trainer = _trainer(settings, part, [*callbacks, *_callbacks(settings, part)], loggers)
    events = trainer.strategy.events
    events.subscribe(part.folder.write_event)
    resume = str(part.checkpoint) if part.checkpoint else None
    plan = plan_run(settings, module, tried, trainer.world_size, trainer.strategy.root_device)
    ours = [logger for logger in loggers if isinstance(logger, StartedLogger)]
    for logger in ours:
        logger.start(events, plain)
    if part.is_first:
        part.folder.write_config(OmegaConf.to_yaml(plain))
        part.folder.write_plan(plan.to_json())
        if tokens is not None:
            console.print(_describe(tokens.meta))
        console.print(plan.table(), end="\n\n")
    if telemetry is not None:
        telemetry.plan = plan
    try:
        trainer.fit(module, datamodule=data, ckpt_path=resume)
    finally:
        for logger in ours:
            logger.finish(0 if trainer.state.finished else 1)
    if not trainer.is_global_zero:
        return {}
    return _summarize(settings, part, trainer, telemetry, plan, tokens, console, changed)


def _quiet() -> None:
    """Keep the output to what a reader needs: the trainer's hints go, its warnings stay."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # The text is mapped memory: workers are a choice (data.workers), not an omission.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")  # a resumed run's
    # Lightning 2.6 asks torch's tree library in the old way, once a batch transfer.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")


def _describe(meta: dict[str, Any]) -> str:
    return (
        f"text: {meta['source']} (Python {meta['python']}), {meta['train_tokens']:,} tokens to train on and "
        f"{meta['val_tokens']:,} to validate, split {meta['split']}"
    )


def build_module(settings: Settings) -> tuple[L.LightningModule, torch.optim.Optimizer]:
    """The run's training module, and an optimizer of its kind on one number.

    Our own model is built on the meta device and takes no memory until it is sharded, unit by unit.

    Raises:
        ConfigError: a class that cannot be found, or that refuses its options.
    """
    plain = settings.plain
    optimizer, scheduler = _make("optimizer", plain["optimizer"]), _make("scheduler", plain["scheduler"])
    make = _make("model", plain["model"], _partial_=True)
    with torch.device("meta") if settings.model is not None else contextlib.nullcontext():
        try:
            module = make(optimizer=optimizer, scheduler=scheduler)
        except TypeError as error:
            raise ConfigError(
                f"model: {plain['model'].get('_target_')} refuses its options: {error}. It is called with the options "
                "of model, and optimizer= and scheduler= (functions that make them); take these."
            ) from error
    return module, _try_out(plain, optimizer, scheduler)


def _make(group: str, node: dict[str, Any], **more: Any) -> Any:
    try:
        return instantiate({**node, **more}, _convert_="all")
    except InstantiationException as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise ConfigError(
                f"{group}: {node.get('_target_')} cannot be built: a package is missing. {cause} Install it with pip, "
                f"or choose another {group.split('.')[0]}."
            ) from error
        raise ConfigError(
            f"{group}: {node.get('_target_')} cannot be built from these options: {cause} "
            f"Correct {group}._target_, or the options of {group}."
        ) from error


def _try_out(plain: dict[str, Any], optimizer: Any, scheduler: Any) -> torch.optim.Optimizer:
    """An optimizer of the run's kind on one number, so that its options are known to be good before ranks exist.

    Raises:
        ConfigError: the optimizer or the schedule refuses its options.
    """
    group = "optimizer"
    try:
        made = optimizer([torch.nn.Parameter(torch.zeros(1))])
        group = "scheduler"
        scheduler(made, total_steps=1)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{group}: {plain[group]['_target_']} refuses its options: {error}.") from error
    return made


def _loggers(settings: Settings, part: Launch) -> list[Any]:
    """The run folder's, then those of the group ``logger``; a ``save_dir`` left open is the run folder."""
    made = [run_log_class("lightning")(part.folder)]
    for name, node in settings.plain["logger"].items():
        more = {"save_dir": str(part.folder.path)} if node.get("save_dir", "") is None else {}
        if node["_target_"] == ENTRIES["logger"]["wandb"][1]:
            more["run_name"] = settings.run.name
        made.append(_make(f"logger.{name}", node, **more))
    return made


def _callbacks(settings: Settings, part: Launch) -> list[L.Callback]:
    callbacks: list[L.Callback] = []
    if (flops := peak_flops(settings)) is not None:
        callbacks.append(DescribedPeak(flops))
    if settings.memwall.overlap.trace:
        callbacks.append(TraceFile(part.folder))
    return callbacks


def _mfu_peak(settings: Settings) -> str:
    if (flops := peak_flops(settings)) is not None:
        return f"described: {flops:.4g} operations/s of hardware {settings.hardware.name}"
    return "measured in the run: the best of a few large matrix products on each rank, in the run's precision"


def _trainer(settings: Settings, part: Launch, callbacks: list[L.Callback], loggers: list[Any]) -> L.Trainer:
    try:
        return L.Trainer(
            **asdict(settings.trainer),
            strategy=MemwallStrategy(settings.memwall),
            callbacks=[*callbacks, *checkpoint_callbacks(settings.run.checkpoints, part.folder)],
            logger=loggers,
            default_root_dir=part.folder.path,
            enable_checkpointing=settings.run.checkpoints.enabled,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except MisconfigurationException as error:
        raise ConfigError(f"Lightning refuses these trainer options: {error}") from error


def _summarize(
    settings: Settings,
    part: Launch,
    trainer: L.Trainer,
    telemetry: TelemetryMethods | None,
    plan: Plan,
    tokens: TokenFiles | None,
    console: Console,
    changed: Sequence[str],
) -> dict[str, float]:
    rows = read_csv(part.folder.metrics)[1] if part.folder.metrics.exists() else []  # nothing was left to train
    figures = run_figures(rows)
    if telemetry is not None:
        figures["train/wall_s"] = telemetry.train_s
    measured = telemetry.peak_bytes if telemetry is not None else {}
    figures["run/wall_s"] = time.time() - psutil.Process().create_time()
    claims = hold_claims(settings.run.claims, figures)
    summary = {
        "status": "success",
        "name": settings.run.name,
        "figures": figures,
        "claims": [asdict(claim) for claim in claims],
        "changed": list(changed),
        "memory": {
            "predicted": {str(p): {str(k): n for k, n in kinds.items()} for p, kinds in plan.kind_peaks.items()},
            "measured": measured,
        },
        "events": telemetry.event_counts if telemetry is not None else {},
        "text": tokens.meta if tokens else None,
        "environment": environment(trainer.world_size, torch.get_num_threads(), str(trainer.strategy.root_device)),
        "mfu_peak": _mfu_peak(settings),
        "seed": settings.run.seed,
    }
    part.folder.write_summary(summary)
    print_summary(console, figures, claims, plan, measured, part.folder.path, changed)
    return figures
