"""`PyTorchDebugger`, which checks tensors and models on demand, and the base of all debuggers."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import field
from itertools import chain
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

import flexinspect_hooks.training_debuggers.measurements as measurements
from flexinspect.core.errors import UsageError
from flexinspect.records.debug_switches import DebugLevel, DictDataclass, parse_level
from flexinspect.records.training_step import EXPLODING_NORM, VANISHING_NORM, ParameterGradient
from flexinspect_hooks.capture import argument_checks
from flexinspect_hooks.control import control_protocols
from flexinspect_hooks.training.gradient_statistics import GradientLimits, gradient_facts, trainable
from flexinspect_hooks.training_debuggers.measurements import ComponentInfo, TensorInfo

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

LOGGER = "flexinspect.debugging"  # figures are DEBUG, anomalies WARNING, errors ERROR
log = logging.getLogger(LOGGER)
FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
LEVEL_EMOJI = {"DEBUG": "🔍", "INFO": "✅", "WARNING": "⚠️", "ERROR": "❌", "CRITICAL": "❌"}


class _EmojiFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{LEVEL_EMOJI.get(record.levelname, '·')} {super().format(record)}"


def debug_logging(
    file: str | Path | None = None,
    *,
    level: int = logging.DEBUG,
    max_bytes: int = 10_000_000,
    backups: int = 5,
    signs: bool = False,
) -> ExitStack:
    """Write the debuggers' log to `file`, or to stderr without one, until the result is closed.

    The file is rotated at `max_bytes`, and `backups` older ones are kept. `signs` puts an emoji for
    the level before each line. Records also have their figures as `record.facts`. The result is
    a context manager, and has `close`.

    Raises `UsageError` for a file that cannot be written, and for a level that is not a number of
    `logging`.
    """
    argument_checks.check_count(level, "level", 0)
    handler: logging.Handler = logging.StreamHandler()
    if file is not None:
        try:
            handler = RotatingFileHandler(file, "a", max_bytes, backups, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"The log {file} cannot be written: {error.strerror}.") from error
    handler.setFormatter((_EmojiFormatter if signs else logging.Formatter)(FORMAT))
    active = ExitStack()
    active.callback(handler.close)
    active.callback(log.setLevel, log.level)
    active.callback(log.removeHandler, handler)
    log.addHandler(handler)
    log.setLevel(level)
    return active


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


class GradientInfo(DictDataclass):
    """The gradient of one parameter; `largest` (absolute) from ADVANCED on, `tensor` at EXTREME."""

    name: str
    norm: float
    has_nan: bool
    has_inf: bool
    explodes: bool
    vanishes: bool
    largest: float | None = None
    tensor: TensorInfo | None = None


class GradientAnalysis(dict[str, GradientInfo]):
    """The gradients by parameter name, for all parameters that have one."""

    def __init__(self, gradients: Mapping[str, GradientInfo], total_norm: float) -> None:
        super().__init__(gradients)
        self.total_norm = total_norm  # of all gradients; NaN or Inf if one is non-finite

    @property
    def params_with_nan_grad(self) -> int:
        """How many parameters have a gradient with NaN."""
        return len(self.nan_grad_params)

    @property
    def params_with_inf_grad(self) -> int:
        """How many parameters have a gradient with Inf."""
        return len(self.inf_grad_params)

    @property
    def nan_grad_params(self) -> list[str]:
        """Parameters whose gradient has NaN."""
        return [name for name, info in self.items() if info.has_nan]

    @property
    def inf_grad_params(self) -> list[str]:
        """Parameters whose gradient has Inf."""
        return [name for name, info in self.items() if info.has_inf]


class ModelReport(DictDataclass):
    """Whether a model has problems: see `PyTorchDebugger.validate_model`."""

    is_valid: bool
    problems: tuple[str, ...]
    components: dict[str, ComponentInfo]
    memory: dict[str, int]
    output: tuple[TensorInfo, ...] = ()


class PyTorchDebugger(BaseDebugger):
    """Checks tensors and models on demand, counts anomalies, and keeps a bounded history.

    A gradient of one parameter with a norm above `explosion` or below `vanishing` is an anomaly:
    choose these limits per model.
    """

    def analyze_tensor(
        self,
        tensor: Tensor,
        name: str = "tensor",
        *,
        shape: Sequence[int | None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> TensorInfo:
        """Measure a tensor at this level, and count NaN, Inf and wrong shapes or dtypes.

        `shape` (None is any size) and `dtype` are the expected ones.
        """
        argument_checks.check_tensor(tensor, "analyze_tensor")
        info = measurements.tensor_infos({name: tensor}, self.level)[name]
        wrong: dict[str, str] = {}
        if shape is not None and not _shape_matches(info.shape, shape):
            wrong["shape"] = f"has shape {info.shape}, but {tuple(shape)} is expected"
        if dtype is not None and tensor.dtype != dtype:
            expected = str(dtype).removeprefix("torch.")
            wrong["dtype"] = f"is {info.dtype}, but {expected} is expected"
        anomalies = self._nonfinite_anomalies(info, name)
        for kind, problem in wrong.items():
            anomalies.append(self._make_anomaly(kind, name, f"{name} {problem}.", tensor=info))
        self._record_analysis([info], anomalies)
        return info

    def analyze_model_parameters(self, model: nn.Module) -> dict[str, TensorInfo]:
        """Measure each parameter at this level, by name."""
        argument_checks.check_module(model, "analyze_model_parameters")
        infos = measurements.tensor_infos(dict(model.named_parameters()), self.level)
        found = (self._nonfinite_anomalies(info, info.name) for info in infos.values())
        self._record_analyses(infos, [*chain.from_iterable(found)])
        return infos

    def analyze_gradients(self, model: nn.Module) -> GradientAnalysis:
        """Measure each parameter's gradient, by name; parameters without one are left out."""
        argument_checks.check_module(model, "analyze_gradients")
        level, limits = self.level, (self._explosion, self._vanishing)
        trained, with_max = trainable(model), level.includes(DebugLevel.ADVANCED)
        gradients = gradient_facts(trained, with_max=with_max)
        tensors: dict[str, TensorInfo] = {}
        if level is DebugLevel.EXTREME:
            tensors = measurements.gradient_infos(dict(model.named_parameters()), level)
        infos = {
            one.name: GradientInfo(
                name=one.name,
                norm=one.norm,
                has_nan=one.n_nan > 0,
                has_inf=one.n_inf > 0,
                explodes=one.explodes(self._explosion),
                vanishes=one.is_matrix and one.vanishes(self._vanishing),
                largest=one.max,
                tensor=tensors.get(one.name),
            )
            for one in gradients.rows
        }
        anomalies = self._gradient_anomalies(gradients.outliers(limits), limits, tensors=tensors)
        self._record_analyses(infos, anomalies)
        return GradientAnalysis(infos, gradients.total)

    def check_gradient_explosion(
        self, model: nn.Module, threshold: float = EXPLODING_NORM
    ) -> list[str]:
        """The parameters whose gradient norm is above the threshold.

        Gradients with Inf or NaN are not included: see `analyze_gradients`.
        """
        return self._check_norms(model, "explosion", threshold)

    def check_gradient_vanishing(
        self, model: nn.Module, threshold: float = VANISHING_NORM
    ) -> list[str]:
        """The parameters whose gradient norm is below the threshold, including 0."""
        return self._check_norms(model, "vanishing", threshold)

    def profile_memory_usage(self, model: nn.Module) -> dict[str, int]:
        """Bytes of `parameters`, `gradients`, `buffers`, their `total`, and of the rest.

        `process` is the resident memory of this process, `system_used` that of all processes;
        `cuda_allocated` and `cuda_reserved` are 0 without CUDA.
        """
        argument_checks.check_module(model, "profile_memory_usage")
        return measurements.memory_of(model)

    def validate_model(self, model: nn.Module, *inputs: Any, **named_inputs: Any) -> ModelReport:
        """Check a model's weights and parts; with inputs, also run it once and check its output.

        The run has no gradients, and the model stays in its mode. An exception of the run is one
        of the problems, with the module that raised it; its stack is in the history.
        """
        argument_checks.check_module(model, "validate_model")
        modules = measurements.parts_of(model)
        parts = {name: measurements.component_info(one, name) for name, one in modules.items()}
        output: tuple[TensorInfo, ...] = ()
        error: Exception | None = None
        if inputs or named_inputs:
            try:
                with torch.no_grad():
                    tensors = [*measurements.tensors_in(model(*inputs, **named_inputs))]
            except Exception as raised:
                error, tensors = raised, []
            named = {f"output {number}": one for number, one in enumerate(tensors)}
            output = tuple(measurements.tensor_infos(named, self.level).values())
        problems = tuple(measurements.weight_problems(parts.values()))
        problems += tuple(measurements.nonfinite_problems(output, ""))
        self._record_problems("model", problems)
        if error is not None:
            self.report_error(error)
            problems += (measurements.describe_forward_error(error, model),)
        return ModelReport(not problems, problems, parts, measurements.memory_of(model), output)

    def _check_norms(self, model: nn.Module, kind: str, threshold: float) -> list[str]:
        argument_checks.check_module(model, f"check_gradient_{kind}")
        argument_checks.check_limit(threshold, "threshold")
        gradients = gradient_facts(trainable(model), with_max=False).rows
        if kind == "explosion":
            side, names = "above", [one.name for one in gradients if one.explodes(threshold)]
        else:
            side, names = "below", [one.name for one in gradients if one.norm < threshold]
        sentence = f"Gradient {kind} in {{}}: its norm is {side} {threshold:g}."
        anomalies = [self._make_anomaly(kind, name, sentence.format(name)) for name in names]
        self._record_analysis([], anomalies)
        return names

    def _record_analyses(self, infos: Mapping[str, Any], anomalies: list[Anomaly]) -> None:
        """Count an analysis of many tensors; its history has all of them at EXTREME."""
        self._record_analysis(infos.values() if self.level is DebugLevel.EXTREME else (), anomalies)


def _shape_matches(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    same_rank = len(shape) == len(expected)
    return same_rank and all(size in (None, n) for n, size in zip(shape, expected, strict=True))


@contextmanager
def debug_context(
    level: DebugLevel | str = DebugLevel.BASIC, **options: Any
) -> Iterator[PyTorchDebugger]:
    """A `PyTorchDebugger` with these options for a block; its summary is logged at the end.

    From ADVANCED on, an exception inside is recorded with its full stack and raised again; at
    EXTREME the block also runs in autograd's anomaly mode.
    """
    debugger = PyTorchDebugger(level, **options)
    is_extreme = debugger.level is DebugLevel.EXTREME
    try:
        with debugger.autograd_anomaly_detection() if is_extreme else nullcontext():
            yield debugger
    except Exception as error:
        if debugger.level is DebugLevel.ADVANCED:
            debugger.report_error(error)
        raise
    finally:
        log.info("Debugging is over: %s", debugger.get_debug_summary())
