"""Arguments and environment that contradict memwall, refused by name before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from memwall_strategy.accelerate.plugin import MemwallPlugin
from memwall_strategy.core.errors import ConfigError, nearest

PRECISIONS = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""Accelerate's name -> memwall's."""

_ENGINES = {
    "deepspeed_plugin": "DeepSpeed shards by itself",
    "deepspeed_plugins": "DeepSpeed shards by itself",
    "fsdp_plugin": "memwall applies FSDP2 itself",
    "megatron_lm_plugin": "Megatron-LM shards by itself",
    "torch_tp_plugin": "memwall's mesh is data parallel",
    "parallelism_config": "memwall makes its own mesh (replicate=N for HSDP)",
}
_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "Accelerate's FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "Accelerate's parallelism_config",
}
_FP8 = ("FP8RecipeKwargs", "TERecipeKwargs", "AORecipeKwargs", "MSAMPRecipeKwargs")
_HANDLERS = ("DistributedDataParallelKwargs", *_FP8)
"""Classes of ``accelerate.utils``; by name, because not every version has all."""
_COMPILE = "Compile the model yourself, torch.compile(model), before acc.prepare"


def check_plugin(memwall: Any) -> MemwallPlugin:
    """The plugin that was passed, or a new one with the defaults.

    Raises:
        ConfigError: something else was passed.
    """
    if memwall is None:
        return MemwallPlugin()
    if not isinstance(memwall, MemwallPlugin):
        raise ConfigError(
            f"memwall={memwall!r} must be a MemwallPlugin. Write memwall=MemwallPlugin(pool=PoolConfig(...))."
        )
    return memwall


def check_arguments(options: Mapping[str, Any]) -> None:
    """Refuse what would shard, wrap, compile or compute differently.

    Args:
        options: keywords of ``Accelerator``.

    Raises:
        ConfigError: the argument or environment variable, why, and what to do instead.
    """
    for name, why in _ENGINES.items():
        if options.get(name) is not None:
            raise ConfigError(f"MemwallAccelerator({name}=...): {why}. Leave it out, or use a plain Accelerator.")
    for variable, engine in _SWITCHES.items():
        if _is_on(os.environ.get(variable)):
            raise ConfigError(
                f"{variable}={os.environ[variable]} asks for {engine} (from `accelerate launch` or its config file), "
                "which cannot run beside memwall. Unset it, or start the script with torchrun."
            )
    for handler in options.get("kwargs_handlers") or ():
        if type(handler).__name__ in _HANDLERS:
            raise ConfigError(
                f"kwargs_handlers=[{type(handler).__name__}(...)]: memwall wraps nothing in DDP and computes "
                "nothing in fp8. Leave it out."
            )
    backend = options.get("dynamo_backend") or getattr(options.get("dynamo_plugin"), "backend", None)
    if backend is not None and str(getattr(backend, "value", backend)).lower() != "no":
        raise ConfigError(f"dynamo_backend={getattr(backend, 'value', backend)}: {_COMPILE}.")
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise ConfigError(f"ACCELERATE_DYNAMO_BACKEND={os.environ['ACCELERATE_DYNAMO_BACKEND']}: {_COMPILE}.")
    asked = options.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    name = str(getattr(asked, "value", asked)).lower()
    if name not in PRECISIONS:
        raise ConfigError(
            f"mixed_precision={name!r} is not supported by memwall.{nearest(name, PRECISIONS)} "
            f"Choose one of {', '.join(PRECISIONS)}."
        )


def _is_on(value: str | None) -> bool:
    return value is not None and value.lower() in ("1", "true", "yes", "on", "y", "t")
