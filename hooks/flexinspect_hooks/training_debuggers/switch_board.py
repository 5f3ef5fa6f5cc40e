"""The thirteen switches of debuggers: set at any time, effective from the next step on."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch

from flexinspect.core.errors import UsageError
from flexinspect.inputs.config import load_config
from flexinspect.records.debug_switches import SWITCHES, DebugSwitches, parse_switch, short_name

_log = logging.getLogger("flexinspect.debugging")

T = TypeVar("T")

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
        self._set(switches or DebugSwitches(), {})

    def enable_debugging(
        self, names: str | Iterable[str] | None = None, *, when: StepCondition | None = None
    ) -> None:
        """Turn on switches by short ("memory_usage") or full name; without names, all.

        `when` takes a step's number and returns whether the switches act in it (default: always).
        Raises `UsageError`, which lists all switches, for an unknown name; then nothing changes.
        """
        chosen = _full_names(names)
        if when is not None and not callable(when):
            raise UsageError("when must be a function of the step's number.")
        conditions = {name: old for name, old in self._conditions.items() if name not in chosen}
        if when is not None:
            conditions |= dict.fromkeys(chosen, when)
        self._set(self.now.with_switches(chosen, True), conditions)

    def disable_debugging(self, names: str | Iterable[str] | None = None) -> None:
        """Turn off switches by name; without names, all."""
        chosen = _full_names(names)
        conditions = {name: old for name, old in self._conditions.items() if name not in chosen}
        self._set(self.now.with_switches(chosen, False), conditions)

    def get_debugging_status(self) -> dict[str, bool]:
        """The state of each of the thirteen switches by full name."""
        return self.now.status()

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
            _log.warning(
                "The switch %s failed and is off: %s: %s",
                short_name(switch),
                type(error).__name__,
                error,
            )
            return None

    def _set(self, switches: DebugSwitches, when: Mapping[str, StepCondition]) -> None:
        with self._lock:
            self.now, self._conditions = switches, dict(when)
            _anomaly_mode.request(id(self), switches.enable_autograd_anomaly)


class HasSwitches:
    """Base of classes with a switch board; its functions are also theirs."""

    switches: SwitchBoard

    def enable_debugging(
        self, names: str | Iterable[str] | None = None, *, when: StepCondition | None = None
    ) -> None:
        """Turn switches on by short or full name; without names, all. See `SwitchBoard`."""
        self.switches.enable_debugging(names, when=when)

    def disable_debugging(self, names: str | Iterable[str] | None = None) -> None:
        """Turn switches off; without names, all."""
        self.switches.disable_debugging(names)

    def get_debugging_status(self) -> dict[str, bool]:
        """The state of the thirteen switches by full name."""
        return self.switches.get_debugging_status()


def _full_names(names: str | Iterable[str] | None) -> tuple[str, ...]:
    if names is None:
        return SWITCHES
    if not isinstance(names, Iterable):
        raise UsageError(f"Switches have names, and {names!r} is not a name.")
    return tuple(parse_switch(name) for name in ([names] if isinstance(names, str) else names))


class _AnomalyMode:
    """Autograd's anomaly mode of the process: on while any board requests it."""

    def __init__(self) -> None:
        self._requesters: set[int] = set()
        self._mode_before = (False, True)
        self._lock = threading.Lock()

    def request(self, board: int, enabled: bool) -> None:
        """Register the request of a board, and set the mode accordingly."""
        with self._lock:
            was_on = bool(self._requesters)
            (self._requesters.add if enabled else self._requesters.discard)(board)
            if was_on == bool(self._requesters):
                return
            if enabled:
                self._turn_on()
            else:
                torch.autograd.set_detect_anomaly(*self._mode_before)

    def _turn_on(self) -> None:
        self._mode_before = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        torch.autograd.set_detect_anomaly(True)
        _log.warning(
            "Autograd anomaly detection is on: every backward pass is slower, for small models "
            "several times; turn it off with disable_debugging()."
        )


_anomaly_mode = _AnomalyMode()
_common_boards: list[SwitchBoard] = []


def check_board(board: SwitchBoard | None) -> SwitchBoard | None:
    """Return the board unchanged. Raises `UsageError` if it is not a `SwitchBoard`."""
    if board is not None and not isinstance(board, SwitchBoard):
        raise UsageError(f"switches must be a SwitchBoard, not a {type(board).__name__}.")
    return board


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


def enable_debugging(
    names: str | Iterable[str] | None = None, *, when: StepCondition | None = None
) -> None:
    """Turn switches of the common board on: see `SwitchBoard.enable_debugging`."""
    common_board().enable_debugging(names, when=when)


def disable_debugging(names: str | Iterable[str] | None = None) -> None:
    """Turn switches of the common board off; without names, all."""
    common_board().disable_debugging(names)


def get_debugging_status() -> dict[str, bool]:
    """The state of the thirteen switches of the common board by full name."""
    return common_board().get_debugging_status()
