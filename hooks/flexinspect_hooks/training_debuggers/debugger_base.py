"""What all debuggers share: a level, a bounded history, counts of anomalies, alerts and the log.

Also the registry for the control server, which holds debuggers weakly. It reports the counts of the
newest live debugger of each kind; clearing and setting a level apply to all of them.
"""

from __future__ import annotations

import logging
import threading
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch

from flexinspect.core.errors import UsageError
from flexinspect.records.debug_switches import DebugLevel, parse_level
from flexinspect_hooks.capture import argument_checks
from flexinspect_hooks.control.control_protocols import (
    AnomalyCounts,
    register_counter,
    unregister_counter,
)
from flexinspect_hooks.control.control_protocols import DebuggerKind as Kind
from flexinspect_hooks.training_debuggers.result_types import Anomaly, DebugSummary, TensorInfo

NAN_LOSS = (
    "Check the inputs for NaN, Inf and labels out of range.",
    "Check the parameters: one that is NaN already makes every later loss NaN.",
    "Lower the learning rate; above 1.0 it is rarely meant.",
)
EXPLOSION = (
    "Lower the learning rate.",
    "Clip the gradients: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0).",
    "Check how the inputs are scaled.",
)
ADVICE_BY_KIND: Mapping[str, tuple[str, ...]] = {
    "loss": NAN_LOSS,
    "nan": NAN_LOSS,
    "inf": NAN_LOSS,
    "explosion": EXPLOSION,
    "jump": EXPLOSION,
    "vanishing": (
        "Raise the learning rate.",
        "Use other activations (ReLU or GELU in place of sigmoid or tanh).",
        "Check how the parameters are initialised.",
        "Add skip connections.",
    ),
    "memory": (
        "Make the batches smaller.",
        "Use gradient checkpointing.",
        "Move rarely used tensors to the CPU.",
        "Train in mixed precision.",
    ),
    "anomaly rate": (
        "Check the architecture: normalisation, and layers that end in NaN for some inputs.",
        "Check the preprocessing of the data.",
        "Lower the learning rate.",
        "Check how the parameters are initialised.",
    ),
    "nothing found": (
        "Check torch.is_anomaly_enabled() inside the training step: the switch may be off.",
        "Use the context manager around forward and backward, not only around the backward pass.",
        "Check the version: torch.__version__ must be the one that flexinspect was installed for.",
    ),
    "history": (
        "A history is bounded: use a smaller one with history=…",
        "Clear it from time to time with clear_debug_history().",
    ),
}
"""What helps, by kind of problem."""


def advice(kind: str) -> tuple[str, ...]:
    """What usually helps against a kind of problem, () for an unknown kind."""
    return ADVICE_BY_KIND.get(kind, ())


_debuggers: dict[Kind, list[weakref.ref[Any]]] = {}


class NewestDebugger:
    """A kind of debugger for the control server."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def counts(self) -> AnomalyCounts:
        """The counts of the newest live debugger, zeros without one."""
        debuggers = _live_debuggers(self._kind)
        return debuggers[-1].counts() if debuggers else AnomalyCounts()

    def clear(self) -> None:
        """Clear every live debugger of the kind."""
        for debugger in _live_debuggers(self._kind):
            debugger.clear_debug_history()

    def set_level(self, level: str) -> None:
        """Set the level of every live debugger of the kind. Raises `UsageError` if unknown."""
        for debugger in _live_debuggers(self._kind):
            debugger.level = level


_newest_by_kind = {kind: NewestDebugger(kind) for kind in get_args(Kind)}


def register_debugger(debugger: BaseDebugger) -> None:
    """Make a debugger the newest of its kind, until a newer one exists or it is deleted."""
    kind = debugger.kind
    _debuggers[kind] = [weakref.ref(each) for each in (*_live_debuggers(kind), debugger)]
    weakref.finalize(debugger, _on_collected, kind)
    register_counter(kind, _newest_by_kind[kind])


def _live_debuggers(kind: Kind) -> list[BaseDebugger]:
    return [debugger for each in _debuggers.get(kind, []) if (debugger := each()) is not None]


def _on_collected(kind: Kind) -> None:
    if not _live_debuggers(kind):
        unregister_counter(kind, _newest_by_kind[kind])


LOGGER = "flexinspect.debugging"
"""The logger of all debuggers; figures are DEBUG, anomalies WARNING, errors ERROR."""
FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
LEVEL_EMOJI = {"DEBUG": "🔍", "INFO": "✅", "WARNING": "⚠️", "ERROR": "❌", "CRITICAL": "❌"}


class _EmojiFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Put the level's emoji before the line."""
        return f"{LEVEL_EMOJI.get(record.levelname, '·')} {super().format(record)}"


class DebugLog:
    """A handler of the debuggers' log, active until `close` or the end of the `with` block."""

    def __init__(self, handler: logging.Handler, level: int) -> None:
        self._handler = handler
        self._logger = logging.getLogger(LOGGER)
        self._level_before = self._logger.level
        self._logger.addHandler(handler)
        self._logger.setLevel(level)

    def close(self) -> None:
        """Remove the handler, restore the level, and close the file."""
        if self._handler in self._logger.handlers:
            self._logger.removeHandler(self._handler)
            self._logger.setLevel(self._level_before)
        self._handler.close()

    def __enter__(self) -> DebugLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def debug_logging(
    file: str | Path | None = None,
    *,
    level: int = logging.DEBUG,
    max_bytes: int = 10_000_000,
    backups: int = 5,
    signs: bool = False,
) -> DebugLog:
    """Write the debuggers' log to `file`, or to stderr without one, until the result is closed.

    The file is rotated at `max_bytes`, and `backups` older ones are kept. `signs` puts an emoji for
    the level before each line. Records also have their figures as `record.facts`.

    Raises `UsageError` for a file that cannot be written, and for a level that is not a number of
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
"""Entries that a debugger keeps by default."""
MIN_ANALYSES_FOR_ALERT = 10
"""Analyses before the rate of anomalies can raise an alert."""

MAX_LOGGED_ANOMALIES = 10
"""Anomalies of one analysis that are logged; the others are only counted and kept."""
_OWN_FILES = tuple(str(path) for path in Path(__file__).parent.glob("*.py"))

log = logging.getLogger(LOGGER)

OnAnomaly = Callable[[Anomaly], Any]


class BaseDebugger:
    """Base of the debuggers; `kind` is its name in the control server.

    `history` is the maximum number of entries; older ones are dropped. A rate of anomalies above
    `alert_above` logs a warning. `on_anomaly` is called with each anomaly; an exception in it is
    logged. Counts and history are safe to use from several threads.
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
        """Reset counts and history; called with the lock held."""
        self._kinds: Counter[str] = Counter()
        self._n_anomalies = self._n_analyses = self._n_anomalous = 0
        self._alerts: deque[str] = deque(maxlen=20)
        self._is_above_alert = False
        self._cached_stack: tuple[tuple[int, int] | None, str] = (None, "")
        self._history.clear()

    @property
    def level(self) -> DebugLevel:
        """How much is measured; a new value applies from the next call on."""
        return self._level

    @level.setter
    def level(self, level: DebugLevel | str) -> None:
        self._level = parse_level(level)

    @property
    def history(self) -> tuple[Any, ...]:
        """The entries in the history, the oldest first."""
        with self._lock:
            return tuple(self._history)

    def get_debug_summary(self) -> DebugSummary:
        """The counts since the debugger was created or cleared."""
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
        """Clear the history, and count from 0 again."""
        with self._lock:
            self._reset()

    def counts(self) -> AnomalyCounts:
        """The counts for the control server; may be called from any thread."""
        with self._lock:
            return AnomalyCounts(
                total_anomalies=self._n_anomalies,
                debug_history_length=len(self._history),
                total_steps=self._n_analyses,
                anomaly_steps=self._n_anomalous,
            )

    @contextmanager
    def autograd_anomaly_detection(self) -> Iterator[None]:
        """Run the block in autograd's anomaly mode, which names the operation that made a NaN.

        An exception inside is recorded with its full stack and raised again. The mode is restored
        afterwards. It is slow: small models take several times as long.
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
        """Record an exception with its full stack, and facts of the tensor that it is about."""
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

    def _nonfinite_anomalies(
        self, info: TensorInfo, where: str, cause: str = "", *, step: int | None = None
    ) -> list[Anomaly]:
        """An anomaly for NaN and one for Inf in a tensor."""
        shape = "x".join(map(str, info.shape)) or "a single value"
        return [
            self._make_anomaly(
                name.lower(),
                where,
                f"{name} in {info.name} ({count} values, {shape}).{cause}",
                step=step,
                tensor=info,
            )
            for name, count in (("NaN", info.n_nan), ("Inf", info.n_inf))
            if count
        ]

    def _record_problems(self, where: str, problems: Iterable[str]) -> None:
        """Count one analysis of a model, whose problems are anomalies."""
        self._record_analysis([], [self._make_anomaly("model", where, one) for one in problems])

    def _current_stack(self) -> str:
        """The program's stack, formatted once for all anomalies of one analysis."""
        analysis = (threading.get_ident(), self._n_analyses)
        cached_analysis, text = self._cached_stack
        if cached_analysis != analysis:
            frames = traceback.extract_stack()
            text = "".join(
                traceback.format_list([one for one in frames if one.filename not in _OWN_FILES])
            )
            self._cached_stack = (analysis, text)
        return text

    def _record_analysis(self, entries: Iterable[Any], anomalies: Iterable[Anomaly]) -> None:
        """Count one analysis, keep its entries, and report its anomalies."""
        anomalies = list(anomalies)
        with self._lock:
            self._n_analyses += 1
            self._n_anomalous += bool(anomalies)
            self._history.extend(entries)
            self._count_anomalies(anomalies)
            alert = self._check_alert()
        self._report(anomalies)
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
                "… and %d more anomalies of the same step", len(anomalies) - MAX_LOGGED_ANOMALIES
            )

    def _call_on_anomaly(self, callback: OnAnomaly, anomaly: Anomaly) -> None:
        try:
            callback(anomaly)
        except Exception as error:
            log.warning("on_anomaly failed: %s: %s", type(error).__name__, error)

    def _check_alert(self) -> str:
        """The alert if the rate of anomalies has just become high, else ""."""
        alert = ""
        rate = self._n_anomalous / self._n_analyses
        is_high = self._n_analyses >= MIN_ANALYSES_FOR_ALERT and rate > self._alert_above
        if is_high and not self._is_above_alert:
            alert = (
                f"High anomaly rate: {rate:.1%} of {self._n_analyses} analyses, above "
                f"{self._alert_above:.1%}. {' '.join(advice('anomaly rate'))}"
            )
            self._alerts.append(alert)
        self._is_above_alert = is_high
        return alert
