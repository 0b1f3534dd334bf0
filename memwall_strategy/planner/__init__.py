"""Will it fit, before the run: pure functions from specs to a plan. No process group, no device, no torch import."""

from memwall_strategy.planner.activations import ActivationSpec, gpt_activations
from memwall_strategy.planner.bounds import HardwareSpec, StepBounds, bound_step, gpt_flops
from memwall_strategy.planner.host import HostArithmetic, HostSpec, host_arithmetic
from memwall_strategy.planner.memory_plan import plan
from memwall_strategy.planner.plans import Plan
from memwall_strategy.planner.specs import (
    Budgets,
    ClusterSpec,
    ModelSpec,
    OptimizerSpec,
    ParameterSpec,
    PrecisionSpec,
    UnitSpec,
)

__all__ = [
    "ActivationSpec",
    "Budgets",
    "ClusterSpec",
    "HardwareSpec",
    "HostArithmetic",
    "HostSpec",
    "ModelSpec",
    "OptimizerSpec",
    "ParameterSpec",
    "Plan",
    "PrecisionSpec",
    "StepBounds",
    "UnitSpec",
    "bound_step",
    "gpt_activations",
    "gpt_flops",
    "host_arithmetic",
    "plan",
]
