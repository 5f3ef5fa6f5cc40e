"""Levels, phases and the thirteen switches of the training debuggers, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, dataclass_transform

from msgspec import Struct

from flexinspect.core.errors import UsageError


class DebugLevel(StrEnum):
    """How much a debugger measures; each level includes the one before.

    BASIC: NaN and Inf, one gradient norm per parameter, counts of anomalies. ADVANCED: spread and
    range of tensors, explosion and vanishing, memory, parameters. EXTREME: the history of every
    tensor and norm, the values around an anomaly, and where it occurred.
    """

    BASIC = "basic"
    ADVANCED = "advanced"
    EXTREME = "extreme"

    def includes(self, other: DebugLevel) -> bool:
        """Tell whether this level includes `other`."""
        order = list(DebugLevel)
        return order.index(self) >= order.index(other)


class TrainingPhase(StrEnum):
    """The part of a training in which something was reported."""

    SETUP = "setup"
    TRAINING = "training"
    VALIDATION = "validation"
    TESTING = "testing"
    FINISHED = "finished"


def parse_level(level: str) -> DebugLevel:
    """Return the level of a name. Raises `UsageError` with the known names."""
    try:
        return DebugLevel(level)
    except ValueError:
        known = ", ".join(DebugLevel)
        raise UsageError(f"The debug level {level!r} is unknown; the levels are {known}.") from None


class DebugSwitches(Struct, frozen=True):
    """The thirteen switches, off by default; the section [debugging] of the settings names them.

    docs/debugger-api.md says what each of them logs.
    """

    enable_autograd_anomaly: bool = False
    enable_autograd_profiler: bool = False
    enable_tensorboard_profiler: bool = False
    debug_memory_usage: bool = False
    debug_gradient_norms: bool = False
    debug_forward_pass: bool = False
    debug_backward_pass: bool = False
    debug_device_placement: bool = False
    debug_mixed_precision: bool = False
    debug_data_loading: bool = False
    debug_validation: bool = False
    debug_early_stopping: bool = False
    debug_lr_scheduling: bool = False


SWITCHES = DebugSwitches.__struct_fields__
"""The full names, in order."""


def short_name(switch: str) -> str:
    """Return a switch's name without its `debug_` or `enable_`."""
    return switch.removeprefix("debug_").removeprefix("enable_")


_BY_NAME = {name: switch for switch in SWITCHES for name in (switch, short_name(switch))}


def parse_switch(name: str) -> str:
    """Return the full name of a switch from its full or short name.

    Raises `UsageError`, with all names, for an unknown one.
    """
    try:
        return _BY_NAME[name]
    except (KeyError, TypeError):
        known = ", ".join(map(short_name, SWITCHES))
        raise UsageError(f"No switch is called {name!r}; the switches are {known}.") from None


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(field,))
class DictDataclass(dict[str, Any]):
    """Base of frozen dataclasses that are also dicts: `facts.key` and `facts["key"]` are the same.

    A result is therefore typed when it is read by attribute, and can be written as JSON. Each
    subclass is made a dataclass.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, eq=False)(cls)

    def __post_init__(self) -> None:
        self.update({each.name: getattr(self, each.name) for each in fields(self)})  # type: ignore[arg-type]
