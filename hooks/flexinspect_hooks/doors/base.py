"""What all debuggers share: a level, a bounded history, the count of anomalies, alerts."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch

from flexinspect.advice import advice
from flexinspect.debugging import DebugLevel, parse_level
from flexinspect_hooks import given
from flexinspect_hooks.control.parts import AnomalyCounts
from flexinspect_hooks.control.parts import DebuggerKind as Kind
from flexinspect_hooks.doors import registry
from flexinspect_hooks.doors.logs import LOGGER
from flexinspect_hooks.doors.results import Anomaly, DebugSummary, TensorInfo

DEFAULT_HISTORY = 1000
"""Entries that a debugger keeps unless told otherwise."""
MIN_ANALYSES_FOR_ALERT = 10
"""Analyses before a rate of anomalies says anything."""

MAX_LOGGED_ANOMALIES = 10
"""Anomalies of one analysis that the log names; the others are counted, and kept."""
_OWN_FILES = tuple(str(path) for path in Path(__file__).parent.glob("*.py"))

log = logging.getLogger(LOGGER)

OnAnomaly = Callable[[Anomaly], Any]


class BaseDebugger:
    """Base of the debuggers; `kind` is the name under which the control server asks for it.

    `history` bounds the entries kept (older ones go). `alert_above` is the rate of anomalies from
    which a warning is logged, and `on_anomaly` is called with each one; when it raises, that is
    logged. Counts and history may be read, added to and cleared from several threads.
    """

    kind: ClassVar[Kind] = "general"

    def __init__(
        self,
        level: DebugLevel | str = DebugLevel.BASIC,
        *,
        history: int = DEFAULT_HISTORY,
        alert_above: float = 0.1,
        on_anomaly: OnAnomaly | None = None,
    ) -> None:
        self._level = parse_level(level)
        self._history: deque[Any] = deque(maxlen=given.check_count(history, "history"))
        self._alert_above = given.check_limit(alert_above, "alert_above")
        if on_anomaly is not None:
            given.check_function(on_anomaly, "on_anomaly", "an anomaly")
        self._on_anomaly = on_anomaly
        self._lock = threading.RLock()  # never held while a callback or the log runs
        self._reset()
        registry.register_debugger(self)

    def _reset(self) -> None:
        """Count from 0; called with the lock held."""
        self._kinds: Counter[str] = Counter()
        self._n_anomalies = self._n_analyses = self._n_anomalous = 0
        self._alerts: deque[str] = deque(maxlen=20)
        self._is_above_alert = False
        self._cached_stack: tuple[tuple[int, int] | None, str] = (None, "")
        self._history.clear()

    @property
    def level(self) -> DebugLevel:
        """How much is looked at; may be changed at any time, effective from the next call."""
        return self._level

    @level.setter
    def level(self, level: DebugLevel | str) -> None:
        self._level = parse_level(level)

    @property
    def history(self) -> tuple[Any, ...]:
        """What is kept, the oldest first."""
        with self._lock:
            return tuple(self._history)

    def get_debug_summary(self) -> DebugSummary:
        """Return the counts since the debugger was made or cleared."""
        with self._lock:
            return DebugSummary(
                level=self._level.value,
                total_anomalies=self._n_anomalies,
                debug_history_length=len(self._history),
                analyses=self._n_analyses,
                anomaly_rate=self._n_anomalous / self._n_analyses if self._n_analyses else 0.0,
                anomalies_by_kind=dict(self._kinds),
                alerts=tuple(self._alerts),
            )

    def clear_debug_history(self) -> None:
        """Forget what is kept, and count from 0 again."""
        with self._lock:
            self._reset()

    def counts(self) -> AnomalyCounts:
        """Return the counts that the control server gives out; may be called from any thread."""
        with self._lock:
            return AnomalyCounts(
                total_anomalies=self._n_anomalies,
                debug_history_length=len(self._history),
                total_steps=self._n_analyses,
                anomaly_steps=self._n_anomalous,
            )

    @contextmanager
    def autograd_anomaly_detection(self) -> Iterator[None]:
        """Run forward and backward so that autograd names the operation that made a NaN.

        What is raised inside is recorded with its full stack, and raised on. The mode is afterwards
        what it was before. Slow: for small models several times.
        """
        before = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        torch.autograd.set_detect_anomaly(True)
        try:
            yield
        except Exception as error:
            self.report_error(error)
            raise
        finally:
            torch.autograd.set_detect_anomaly(*before)

    def report_error(self, error: BaseException, tensor: TensorInfo | None = None) -> Anomaly:
        """Record an exception with its full stack, and what is known of the tensor it is about."""
        stack = "".join(traceback.format_exception(error))
        sentence = f"{type(error).__name__}: {error}"
        anomaly = Anomaly("error", "exception", sentence, tensor=tensor, stack=stack)
        with self._lock:
            self._count_anomalies([anomaly])
        self._report([anomaly])
        return anomaly

    def _make_anomaly(
        self, kind: str, where: str, sentence: str, *, step: int | None = None, tensor: Any = None
    ) -> Anomaly:
        stack = self._current_stack() if self._level is DebugLevel.EXTREME else ""
        return Anomaly(kind, where, sentence, step, advice(kind), tensor, stack)

    def _current_stack(self) -> str:
        """Return where the program is; made once for the anomalies of one analysis."""
        analysis = (threading.get_ident(), self._n_analyses)
        of, text = self._cached_stack
        if of != analysis:
            frames = traceback.extract_stack()
            text = "".join(
                traceback.format_list([one for one in frames if one.filename not in _OWN_FILES])
            )
            self._cached_stack = (analysis, text)
        return text

    def _record_analysis(self, entries: Iterable[Any], anomalies: Iterable[Anomaly]) -> None:
        """Count one analysis, keep its entries, and meet its anomalies."""
        found = list(anomalies)
        with self._lock:
            self._n_analyses += 1
            self._n_anomalous += bool(found)
            self._history.extend(entries)
            self._count_anomalies(found)
            alert = self._check_alert()
        self._report(found)
        if alert:
            with suppress(Exception):
                log.warning("%s", alert)

    def _count_anomalies(self, anomalies: Sequence[Anomaly]) -> None:
        self._n_anomalies += len(anomalies)
        self._kinds.update(anomaly.kind for anomaly in anomalies)
        self._history.extend(anomalies)

    def _report(self, anomalies: Sequence[Anomaly]) -> None:
        for number, anomaly in enumerate(anomalies):
            if number < MAX_LOGGED_ANOMALIES:
                log.warning("%s", anomaly.sentence, extra={"facts": anomaly})
            if self._on_anomaly is not None:
                self._call_on_anomaly(self._on_anomaly, anomaly)
        if len(anomalies) > MAX_LOGGED_ANOMALIES:
            log.warning(
                "… and %d more anomalies of the same time", len(anomalies) - MAX_LOGGED_ANOMALIES
            )

    def _call_on_anomaly(self, callback: OnAnomaly, anomaly: Anomaly) -> None:
        try:
            callback(anomaly)
        except Exception as error:
            log.warning("on_anomaly failed: %s: %s", type(error).__name__, error)

    def _check_alert(self) -> str:
        """Return what is to be said once the rate of anomalies is high, else nothing."""
        said = ""
        rate = self._n_anomalous / self._n_analyses
        is_high = self._n_analyses >= MIN_ANALYSES_FOR_ALERT and rate > self._alert_above
        if is_high and not self._is_above_alert:
            said = (
                f"High anomaly rate: {rate:.1%} of {self._n_analyses} analyses, above "
                f"{self._alert_above:.1%}. {' '.join(advice('anomaly rate'))}"
            )
            self._alerts.append(said)
        self._is_above_alert = is_high
        return said


def find_nonfinite(info: TensorInfo) -> list[tuple[str, str]]:
    """Return (kind, sentence) for the NaN and the Inf of a tensor."""
    shape = "x".join(map(str, info.shape)) or "a single value"
    found = []
    if info.has_nan:
        found.append(("nan", f"NaN in {info.name} ({info.n_nan} values, {shape})."))
    if info.has_inf:
        found.append(("inf", f"Inf in {info.name} ({info.n_inf} values, {shape})."))
    return found
