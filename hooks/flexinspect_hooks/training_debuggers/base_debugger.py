"""The base of all debuggers: levels, history, counted anomalies, advice, and the log."""

from __future__ import annotations

import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import torch

from flexinspect.records.debug_switches import DebugLevel, DictDataclass, parse_level
from flexinspect.records.training_step import EXPLODING_NORM, VANISHING_NORM, ParameterGradient
from flexinspect_hooks.capture import argument_checks
from flexinspect_hooks.control import control_protocols
from flexinspect_hooks.training.gradient_statistics import GradientLimits
from flexinspect_hooks.training_debuggers.debug_log import log
from flexinspect_hooks.training_debuggers.measurements import TensorInfo

HISTORY = 1000  # entries that a debugger keeps by default
MIN_ANALYSES_FOR_ALERT = 10  # analyses before the rate of anomalies can raise an alert
MAX_LOGGED_ANOMALIES = 10  # of one analysis; the others are only counted and kept
_OWN_FILES = tuple(str(path) for path in Path(__file__).parent.glob("*.py"))

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
    **dict.fromkeys(("loss", "nan", "inf"), NAN_LOSS),
    **dict.fromkeys(("explosion", "jump"), EXPLOSION),
    "vanishing": (
        "Raise the learning rate.",
        "Use other activations (ReLU or GELU in place of sigmoid or tanh).",
        "Check how the parameters are initialised.",
        "Add skip connections.",
    ),
    "anomaly rate": (
        "Check the architecture: normalisation, and layers that end in NaN for some inputs.",
        "Check the preprocessing of the data.",
        "Lower the learning rate.",
        "Check how the parameters are initialised.",
    ),
}
"""What usually helps, by kind of problem."""


class Anomaly(DictDataclass):
    """One anomaly: what, where, and what usually helps.

    `kind` is one of nan, inf, explosion, vanishing, loss, shape, dtype, model, jump, error.
    `tensor` has facts of the tensor, `stack` (at EXTREME, or of an error) is the program's stack.
    """

    kind: str
    where: str
    sentence: str
    step: int | None = None
    advice: tuple[str, ...] = ()
    tensor: TensorInfo | None = None
    stack: str = ""


OnAnomaly = Callable[[Anomaly], Any]


class DebugSummary(DictDataclass):
    """The counts of a debugger since it was created or cleared.

    `total_anomalies` and `analyses` count all, `debug_history_length` only what is still kept.
    `anomaly_rate` is the share of the analyses with an anomaly. `alerts` are sentences on
    thresholds that were exceeded.
    """

    level: str
    total_anomalies: int
    debug_history_length: int
    analyses: int
    anomaly_rate: float
    anomalies_by_kind: dict[str, int] = field(default_factory=dict)
    alerts: tuple[str, ...] = ()


class BaseDebuggerOptions(TypedDict, total=False):
    """The options of all debuggers, which `BaseDebugger` explains."""

    history: int
    explosion: float
    vanishing: float
    alert_above: float
    on_anomaly: OnAnomaly | None


class BaseDebugger:
    """Base of the debuggers; `kind` is its name in the control server, which holds it weakly.

    `history` is the maximum number of entries; older ones are dropped. A rate of anomalies above
    `alert_above` logs a warning. `on_anomaly` is called with each anomaly; an exception in it is
    logged. `explosion` and `vanishing` are limits of the norm of a gradient, where it is checked.
    Counts and history are safe to use from several threads.
    """

    kind: ClassVar[control_protocols.DebuggerKind] = "general"

    def __init__(
        self,
        level: DebugLevel | str = DebugLevel.BASIC,
        *,
        history: int = HISTORY,
        explosion: float = EXPLODING_NORM,
        vanishing: float = VANISHING_NORM,
        alert_above: float = 0.1,
        on_anomaly: OnAnomaly | None = None,
    ) -> None:
        self._level = parse_level(level)
        self._history: deque[Any] = deque(maxlen=argument_checks.check_count(history, "history"))
        self._explosion = argument_checks.check_limit(explosion, "explosion")
        self._vanishing = argument_checks.check_limit(vanishing, "vanishing")
        self._alert_above = argument_checks.check_limit(alert_above, "alert_above")
        if on_anomaly is not None:
            argument_checks.check_function(on_anomaly, "on_anomaly", "an anomaly")
        self._on_anomaly = on_anomaly
        self._lock = threading.RLock()  # never held while a callback or the log runs
        self._reset()
        control_protocols.register_counter(self.kind, self)

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
                total_anomalies=self.counts().total_anomalies,
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

    clear = clear_debug_history

    def counts(self) -> control_protocols.AnomalyCounts:
        """The counts for the control server; may be called from any thread."""
        with self._lock:
            return control_protocols.AnomalyCounts(
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
        with torch.autograd.set_detect_anomaly(True):
            try:
                yield
            except Exception as error:
                self.report_error(error)
                raise

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
        return Anomaly(kind, where, sentence, step, ADVICE_BY_KIND.get(kind, ()), tensor, stack)

    def _nonfinite_anomalies(
        self, info: TensorInfo, where: str, cause: str = "", *, step: int | None = None
    ) -> list[Anomaly]:
        shape = "x".join(map(str, info.shape)) or "a single value"
        anomalies = []
        for name, count in (("NaN", info.n_nan), ("Inf", info.n_inf)):
            if count:
                sentence = f"{name} in {info.name} ({count} values, {shape}).{cause}"
                kind = name.lower()
                anomalies.append(self._make_anomaly(kind, where, sentence, step=step, tensor=info))
        return anomalies

    def _gradient_anomalies(
        self,
        gradients: Iterable[ParameterGradient],
        limits: GradientLimits,
        *,
        step: int | None = None,
        tensors: Mapping[str, TensorInfo] | None = None,
    ) -> list[Anomaly]:
        """The anomalies of gradients; `tensors` has measurements of them by parameter name."""
        infos = tensors or {}
        return [
            self._make_anomaly(kind, one.name, sentence, step=step, tensor=infos.get(one.name))
            for one in gradients
            for kind, sentence in gradient_problems(one, limits)
        ]

    def _record_problems(self, where: str, problems: Iterable[str]) -> None:
        """Count one analysis of a model, whose problems are anomalies."""
        self._record_analysis([], [self._make_anomaly("model", where, one) for one in problems])

    def _current_stack(self) -> str:
        """The program's stack, formatted once for all anomalies of one analysis."""
        analysis = (threading.get_ident(), self._n_analyses)
        if self._cached_stack[0] != analysis:
            frames = [one for one in traceback.extract_stack() if one.filename not in _OWN_FILES]
            self._cached_stack = (analysis, "".join(traceback.format_list(frames)))
        return self._cached_stack[1]

    def _record_analysis(self, entries: Iterable[Any], anomalies: Sequence[Anomaly]) -> None:
        """Count one analysis, keep its entries, and report its anomalies."""
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
                try:
                    self._on_anomaly(anomaly)
                except Exception as error:
                    log.warning("on_anomaly failed: %s: %s", type(error).__name__, error)
        if (n_more := len(anomalies) - MAX_LOGGED_ANOMALIES) > 0:
            log.warning("… and %d more anomalies of the same step", n_more)

    def _check_alert(self) -> str:
        """The alert if the rate of anomalies has just become high, else ""."""
        rate, was_high = self._n_anomalous / self._n_analyses, self._is_above_alert
        is_high = self._n_analyses >= MIN_ANALYSES_FOR_ALERT and rate > self._alert_above
        self._is_above_alert = is_high
        if was_high or not is_high:
            return ""
        self._alerts.append(
            f"High anomaly rate: {rate:.1%} of {self._n_analyses} analyses, above "
            f"{self._alert_above:.1%}. {' '.join(ADVICE_BY_KIND['anomaly rate'])}"
        )
        return self._alerts[-1]


def gradient_problems(one: ParameterGradient, limits: GradientLimits) -> Iterator[tuple[str, str]]:
    """(kind, sentence) for each problem of a gradient; only those of matrices can vanish."""
    name, norm, (explosion, vanishing) = one.name, one.norm, limits
    if one.has_nonfinite:
        value = "nan" if one.n_nan else "inf"
        yield value, f"NaN/Inf gradient detected in {name}: {value}"
    if one.explodes(explosion):
        yield "explosion", f"Gradient explosion in {name}: norm {norm:.4g} above {explosion:g}."
    if one.is_matrix and one.vanishes(vanishing):
        yield "vanishing", f"Gradient vanishing in {name}: norm {norm:.4g} below {vanishing:g}."
