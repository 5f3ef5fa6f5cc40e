"""The thirteen switches of debuggers: set at any time, effective from the next step on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TypeVar

import torch

from flexinspect.core.errors import UsageError
from flexinspect.inputs.config import load_config
from flexinspect.records.debug_switches import SWITCHES, DebugSwitches, parse_switch, short_name
from flexinspect_hooks.training_debuggers.debugger_base import log

T = TypeVar("T")

Names = str | Iterable[str] | None
"""Switches by short ("memory_usage") or full name; None for all."""
StepCondition = Callable[[int], bool]
"""Takes the number of a step; returns whether a switch acts in it."""


class SwitchBoard:
    """Thirteen switches, for one debugger or several.

    Reading a switch costs an attribute access. Setting one takes effect from the next step on and
    works from any thread. A switch whose work fails is turned off (`run_guarded`), and the training
    goes on.
    """

    def __init__(self, switches: DebugSwitches | None = None) -> None:
        self.now = DebugSwitches()
        self._conditions: dict[str, StepCondition] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _anomaly_mode.request, id(self), False)
        self._set(switches or self.now, {})

    def enable_debugging(self, names: Names = None, *, when: StepCondition | None = None) -> None:
        """Turn on switches by short ("memory_usage") or full name; without names, all.

        `when` takes a step's number and returns whether the switches act in it (default: always).
        Raises `UsageError`, which lists all switches, for an unknown name; then nothing changes.
        """
        chosen = _full_names(names)
        if when is not None and not callable(when):
            raise UsageError("when must be a function of the step's number.")
        self._turn(chosen, True, {} if when is None else dict.fromkeys(chosen, when))

    def disable_debugging(self, names: Names = None) -> None:
        """Turn off switches by name; without names, all."""
        self._turn(_full_names(names), False, {})

    def get_debugging_status(self) -> dict[str, bool]:
        """The state of each of the thirteen switches by full name."""
        return asdict(self.now)

    def is_active(self, switch: str, step: int) -> bool:
        """Whether a switch, by its full name, is on and acts in this step.

        A switch whose `when` fails is turned off.
        """
        if not getattr(self.now, switch):
            return False
        when = self._conditions.get(switch)
        return when is None or bool(self.run_guarded(switch, lambda: when(step)))

    def run_guarded(self, switch: str, work: Callable[[], T]) -> T | None:
        """Do a switch's work; if that fails, log a warning and turn the switch off."""
        try:
            return work()
        except Exception as error:
            self.disable_debugging([switch])
            kind, name = type(error).__name__, short_name(switch)
            log.warning("The switch %s failed and is off: %s: %s", name, kind, error)
            return None

    def _turn(
        self, chosen: Iterable[str], on: bool, conditions: Mapping[str, StepCondition]
    ) -> None:
        others = {name: old for name, old in self._conditions.items() if name not in chosen}
        self._set(replace(self.now, **dict.fromkeys(chosen, on)), {**others, **conditions})

    def _set(self, switches: DebugSwitches, conditions: dict[str, StepCondition]) -> None:
        with self._lock:
            self.now, self._conditions = switches, conditions
            _anomaly_mode.request(id(self), switches.enable_autograd_anomaly)


class HasSwitches:
    """Base of classes with a switch board; its functions are also theirs."""

    switches: SwitchBoard

    def enable_debugging(self, names: Names = None, *, when: StepCondition | None = None) -> None:
        """Turn switches on by short or full name; without names, all. See `SwitchBoard`."""
        self.switches.enable_debugging(names, when=when)

    def disable_debugging(self, names: Names = None) -> None:
        """Turn switches off; without names, all."""
        self.switches.disable_debugging(names)

    def get_debugging_status(self) -> dict[str, bool]:
        """The state of the thirteen switches by full name."""
        return self.switches.get_debugging_status()


def _full_names(names: Names) -> tuple[str, ...]:
    if names is None:
        return SWITCHES
    if not isinstance(names, Iterable):
        raise UsageError(f"Switches have names, and {names!r} is not a name.")
    return tuple(map(parse_switch, [names] if isinstance(names, str) else names))


class _AnomalyMode:
    """Autograd's anomaly mode of the process: on while any board requests it."""

    def __init__(self) -> None:
        self._requesters: set[int] = set()
        self._mode = ExitStack()
        self._lock = threading.Lock()

    def request(self, board: int, enabled: bool) -> None:
        """Register the request of a board, and set the mode accordingly."""
        with self._lock:
            was_on = bool(self._requesters)
            (self._requesters.add if enabled else self._requesters.discard)(board)
            if was_on and not self._requesters:
                self._mode.close()
            elif enabled and not was_on:
                self._mode.enter_context(torch.autograd.set_detect_anomaly(True))
                log.warning(
                    "Autograd anomaly detection is on: every backward pass is slower, for small "
                    "models several times; turn it off with disable_debugging()."
                )


_anomaly_mode = _AnomalyMode()
_common_boards: list[SwitchBoard] = []


def common_board() -> SwitchBoard:
    """The board of all debuggers without their own, set by the settings section [debugging].

    Raises `UsageError` for a settings file that cannot be used.
    """
    if not _common_boards:
        _common_boards.append(board_of_settings())
    return _common_boards[0]


def board_of_settings(profile: str = "") -> SwitchBoard:
    """A board set by `[debugging.PROFILE]` of the settings, or by `[debugging]` without a profile.

    Raises `UsageError` for an unknown profile.
    """
    profiles = load_config().debugging
    if profile and profile not in profiles:
        known = ", ".join(sorted(name for name in profiles if name)) or "none"
        raise UsageError(f"The settings have no [debugging.{profile}] (profiles: {known}).")
    return SwitchBoard(DebugSwitches(**profiles.get(profile, {})))


def enable_debugging(names: Names = None, *, when: StepCondition | None = None) -> None:
    """Turn switches of the common board on: see `SwitchBoard.enable_debugging`."""
    common_board().enable_debugging(names, when=when)


def disable_debugging(names: Names = None) -> None:
    """Turn switches of the common board off; without names, all."""
    common_board().disable_debugging(names)


def get_debugging_status() -> dict[str, bool]:
    """The state of the thirteen switches of the common board by full name."""
    return common_board().get_debugging_status()
