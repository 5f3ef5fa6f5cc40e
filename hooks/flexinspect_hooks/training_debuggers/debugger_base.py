"""What all debuggers share: a level, a bounded history, the count of anomalies, alerts.

They are held weakly. Of each kind the newest living one answers; a clearing and a level that are
asked for from outside go to all of them.
"""

from __future__ import annotations

import logging
import threading
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import torch

from flexinspect.core.errors import UsageError
from flexinspect.records.debug_switches import DebugLevel, parse_level
from flexinspect_hooks.capture import argument_checks
from flexinspect_hooks.control.targets import AnomalyCounts, register_counter, unregister_counter
from flexinspect_hooks.control.targets import DebuggerKind as Kind
from flexinspect_hooks.training_debuggers.advice import advice
from flexinspect_hooks.training_debuggers.result_types import Anomaly, DebugSummary, TensorInfo

_debuggers: dict[Kind, list[weakref.ref[Any]]] = {}


class NewestDebugger:
    """What the control server asks of a kind of debugger."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def counts(self) -> AnomalyCounts:
        """Return the counts of the newest living debugger, zeros without one."""
        debugger = newest_debugger(self._kind)
        return AnomalyCounts() if debugger is None else debugger.counts()

    def clear(self) -> None:
        """Clear every living debugger of the kind."""
        for debugger in _live_debuggers(self._kind):
            debugger.clear_debug_history()

    def set_level(self, level: str) -> None:
        """Set the level of every living debugger of the kind. Raises `UsageError`: unknown."""
        for debugger in _live_debuggers(self._kind):
            debugger.level = level


_newest_by_kind: dict[Kind, NewestDebugger] = {
    "training": NewestDebugger("training"),
    "diffusion": NewestDebugger("diffusion"),
    "general": NewestDebugger("general"),
}


def register_debugger(debugger: BaseDebugger) -> None:
    """Let a debugger answer for its kind, until a newer one does or it is gone."""
    kind = debugger.kind
    _debuggers[kind] = [weakref.ref(each) for each in (*_live_debuggers(kind), debugger)]
    weakref.finalize(debugger, _on_collected, kind)
    register_counter(kind, _newest_by_kind[kind])


def newest_debugger(kind: Kind) -> BaseDebugger | None:
    """Return the newest living debugger of a kind."""
    found = _live_debuggers(kind)
    return found[-1] if found else None


def _live_debuggers(kind: Kind) -> list[BaseDebugger]:
    return [debugger for each in _debuggers.get(kind, []) if (debugger := each()) is not None]


def _on_collected(kind: Kind) -> None:
    if not _live_debuggers(kind):
        unregister_counter(kind, _newest_by_kind[kind])


LOGGER = "flexinspect.records.debug_switches"
"""The logger of all debuggers; figures are DEBUG, anomalies WARNING, errors ERROR."""
FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
LEVEL_EMOJI = {"DEBUG": "🔍", "INFO": "✅", "WARNING": "⚠️", "ERROR": "❌", "CRITICAL": "❌"}


class _EmojiFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Put the level's sign before the line."""
        return f"{LEVEL_EMOJI.get(record.levelname, '·')} {super().format(record)}"


class DebugLog:
    """A handler of the debuggers' log, from when it is made until `close` or the block's end."""

    def __init__(self, handler: logging.Handler, level: int) -> None:
        self._handler = handler
        self._logger = logging.getLogger(LOGGER)
        self._level_before = self._logger.level
        self._logger.addHandler(handler)
        self._logger.setLevel(level)

    def close(self) -> None:
        """Take the handler out, put the level back, and close the file."""
        if self._handler in self._logger.handlers:
            self._logger.removeHandler(self._handler)
            self._logger.setLevel(self._level_before)
        self._handler.close()

    def __enter__(self) -> DebugLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def debug_logging(
    file: str | Path | None = None,
    *,
    level: int = logging.DEBUG,
    max_bytes: int = 10_000_000,
    backups: int = 5,
    signs: bool = False,
) -> DebugLog:
    """Write what the debuggers say to `file`, or to stderr without one; returns what ends it.

    The file is rotated at `max_bytes`, and `backups` older ones are kept. `signs` puts an emoji for
    the level before each line. Records have their figures as `record.facts` too.

    Raises `UsageError` for a file that cannot be written, and for a level that is no number of
    `logging`.
    """
    argument_checks.check_count(level, "level", 0)
    handler: logging.Handler
    try:
        handler = (
            logging.StreamHandler()
            if file is None
            else RotatingFileHandler(
                file, maxBytes=max_bytes, backupCount=backups, encoding="utf-8"
            )
        )
    except OSError as error:
        raise UsageError(f"The log {file} cannot be written: {error.strerror}.") from error
    handler.setFormatter((_EmojiFormatter if signs else logging.Formatter)(FORMAT))
    return DebugLog(handler, level)


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
        self._history: deque[Any] = deque(maxlen=argument_checks.check_count(history, "history"))
        self._alert_above = argument_checks.check_limit(alert_above, "alert_above")
        if on_anomaly is not None:
            argument_checks.check_function(on_anomaly, "on_anomaly", "an anomaly")
        self._on_anomaly = on_anomaly
        self._lock = threading.RLock()  # never held while a callback or the log runs
        self._reset()
        register_debugger(self)

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
