"""Gradients of generated tokens: NaN, Inf, exploding, vanishing, and parts that get none.

How large a gradient is says little by itself: of a token with a probability near 1 it is tiny. So
all sizes are relative to the gradient at the logits. What is judged of hidden states is how much
their gradient grows from a layer's output to its input, as in Pascanu, Mikolov and Bengio 2013 (On
the difficulty of training recurrent neural networks): through a residual layer of a clean model it
stays within a factor of 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from flexinspect.core.text import format_layers, plural
from flexinspect.records.finding import Finding, Severity
from flexinspect.records.token_gradients import GradientRecord, GradientStat
from flexinspect.rules.engine import FindingKind, Rule

GRADIENT_NAN, GRADIENT_INF = "gradient.nan", "gradient.inf"
EXPLODING, VANISHING, DEAD = "gradient.exploding", "gradient.vanishing", "gradient.dead"
FORWARD_CHECK, ANOMALY = "gradient.gate", "gradient.anomaly"

MAX_LAYER_GROWTH = 100.0
"""Growth of a hidden state's gradient through one layer from which it explodes, and whose inverse
is the shrinking from which it vanishes. Measured: 0.9 to 1.3 in the demo model, 1.1 to 3 in random
models of seven families."""

MIN_RELATIVE_NORM = 1e-6
"""Norm of a weight's gradient, relative to that at the logits, below which it vanishes: the
threshold that training tools use for absolute norms. Clean models stay above 0.1."""

_CHECKED_PARTS = frozenset({"q", "k", "v", "qkv", "o", "mlp"})
"""Parts whose matrices are judged; norms and biases may have small gradients by right."""
_MAX_NAMED_PARAMETERS = 6

_GRADIENT_QUERY = (
    "SELECT layer, part, name, norm, max, n_nan, n_inf FROM grads WHERE generation = {generation} "
    "AND branch = {branch} AND step = {step} ORDER BY layer, name"
)
_TARGET_QUERY = (
    "SELECT target, token_id, value, scale, gate, tolerance, anomaly FROM gradients WHERE "
    "generation = {generation} AND branch = {branch} AND step = {step}"
)
_GRADIENT_CONFIRM = (
    "Panel *Gradients*, view *where*: a row per layer, a column per group of parameters."
)


class GradientsRule(Rule):
    """Judges the gradients of generated tokens; without `--grads` there are none."""

    name: ClassVar[str] = "gradients"
    findings: ClassVar[Mapping[str, FindingKind]] = {
        GRADIENT_NAN: FindingKind(
            Severity.ERROR,
            "NaN in the gradient of a generated token",
            why="Training or attribution on this text would make NaN of every parameter below.",
            confirm=f"{_GRADIENT_CONFIRM} `--detect-anomaly` names the line of the forward.",
            fix=(
                "Look for sqrt, log, division or norm at 0 in the named layer: finite forwards, "
                "and gradients of Inf times 0."
            ),
            query=_GRADIENT_QUERY,
        ),
        GRADIENT_INF: FindingKind(
            Severity.ERROR,
            "Inf in the gradient of a generated token",
            why="The next product with 0 makes NaN of it.",
            confirm=_GRADIENT_CONFIRM,
            fix="Use bfloat16 or float32 in place of float16; look for a division by almost 0.",
            query=_GRADIENT_QUERY,
        ),
        EXPLODING: FindingKind(
            Severity.WARNING,
            "a hidden state's gradient grows a hundredfold through one layer",
            why="Layers below it get all of the gradient, and layers above it next to none.",
            confirm=_GRADIENT_CONFIRM,
            fix="Look at the scale of the named layer's weights and at what its norm divides by.",
            query=_GRADIENT_QUERY,
        ),
        VANISHING: FindingKind(
            Severity.WARNING,
            "gradients that are next to nothing in some layers",
            why="These weights have no say in the token, and training on it would not move them.",
            confirm=_GRADIENT_CONFIRM,
            fix=(
                "Look for weights or norms that are almost 0, a saturated softmax or activation, "
                "a residual connection that is missing, and `detach` or `no_grad` on the way."
            ),
            query=_GRADIENT_QUERY,
        ),
        DEAD: FindingKind(
            Severity.WARNING,
            "weights whose gradient is exactly 0",
            why="The token does not depend on them at all: the layer does not do its part.",
            confirm=_GRADIENT_CONFIRM,
            fix=(
                "Look for a gate or a projection of zeros, weights that were not loaded, "
                "`detach` or `no_grad` in the named layer or behind it, and values so large that a "
                "norm makes 0 of everything."
            ),
            query=_GRADIENT_QUERY,
        ),
        FORWARD_CHECK: FindingKind(
            Severity.WARNING,
            "the forward that was differentiated is not the one that ran",
            why="Its gradients are those of another model, so none are recorded or drawn.",
            confirm="The query has the gate and the tolerance of its dtype.",
            fix=(
                "Look for what depends on the step or the cache: masks that were changed on the "
                "way, layers that keep a state, routing of experts."
            ),
            query=_TARGET_QUERY,
        ),
        ANOMALY: FindingKind(
            Severity.ERROR,
            "autograd's anomaly mode found the function that makes a NaN",
            why="It is the first function of the backward whose result is NaN.",
            confirm="The evidence has the traceback of the forward call that it belongs to.",
            fix="Mend the line at the end of the traceback.",
            query=_TARGET_QUERY,
        ),
    }

    def on_gradients(self, gradients: GradientRecord) -> Sequence[Finding]:
        """Return what is wrong with the gradients of one token."""
        found = [_anomaly_finding(gradients)] if gradients.anomaly else []
        if not gradients.matches_recorded:
            return [*found, _forward_check_finding(gradients)]
        bad = [stat for stat in gradients.stats if stat.n_nan or stat.n_inf]
        if bad:
            return [*found, _nonfinite_gradient_finding(gradients, bad)]
        if not 0 < gradients.scale < math.inf:
            return found  # the probability is 1 to the last digit, and nothing depends on anything
        return [*found, *_check_growth(gradients), *_check_small_gradients(gradients)]


def layer_growth(gradients: GradientRecord) -> list[float]:
    """Return by layer how much the gradient grows from its output to its input; NaN if unknown.

    Of layer 0 it is not known, unless it is 0: its input is small embeddings, which the first norm
    makes large.
    """
    if gradients.layers is None or len(gradients.layers) < 2:
        return []
    at_input, *outputs = gradients.layers
    norms = np.asarray(outputs, np.float64)
    with np.errstate(all="ignore"):
        rates = norms[:-1] / norms[1:]
    return [0.0 if at_input == 0 < norms[0] else math.nan, *(float(rate) for rate in rates)]


def _anomaly_finding(gradients: GradientRecord) -> Finding:
    said, *_ = (gradients.anomaly or "").splitlines()
    evidence = {"function": _anomaly_function(said), "said": gradients.anomaly}
    sentence = f"Autograd's anomaly mode at step {gradients.step}: {said}"
    return _gradient_finding(ANOMALY, gradients, sentence, evidence, series=_anomaly_function(said))


def _anomaly_function(message: str) -> str:
    """Return the name in "Function 'SqrtBackward0' returned nan values in its 0th output."."""
    parts = message.split("'")
    return parts[1] if len(parts) > 2 else message


def _forward_check_finding(gradients: GradientRecord) -> Finding:
    sentence = (
        f"The forward that was to be differentiated for step {gradients.step} "
        f"({gradients.path}) is not what ran: its logits differ by {gradients.gate:.2g} of the "
        f"largest recorded one, and rounding explains {gradients.tolerance:.0e} at most."
    )
    evidence = {"gate": gradients.gate, "tolerance": gradients.tolerance, "path": gradients.path}
    return _gradient_finding(FORWARD_CHECK, gradients, sentence, evidence, series="gate")


def _nonfinite_gradient_finding(gradients: GradientRecord, bad: Sequence[GradientStat]) -> Finding:
    is_nan = any(stat.n_nan for stat in bad)
    kind = "NaN" if is_nan else "Inf"
    n_all = len(gradients.stats)
    start, layer = _find_gradient_origin(gradients)
    sentence = (
        f"{kind} is in the gradient of step {gradients.step}'s {_format_target(gradients)}: in "
        f"{len(bad)} of {plural(n_all, 'parameter')}{_format_stat_layers(gradients, bad)}; {start}."
    )
    evidence: dict[str, Any] = {
        "parameters": [stat.name for stat in bad[:_MAX_NAMED_PARAMETERS]],
        "n_parameters": len(bad),
        "n_nan": sum(stat.n_nan for stat in bad),
        "n_inf": sum(stat.n_inf for stat in bad),
    }
    series = f"{kind} {layer}"
    return _gradient_finding(
        GRADIENT_NAN if is_nan else GRADIENT_INF, gradients, sentence, evidence, layer, series
    )


def _find_gradient_origin(gradients: GradientRecord) -> tuple[str, int | None]:
    """Say where on the way back through the layers it began; the layer, None outside of them."""
    if gradients.value != gradients.value or not math.isfinite(gradients.scale):
        return "the logits are not finite already, so the forward made it", None
    norms = gradients.layers
    watched = {-1, *(stat.layer for stat in gradients.stats)}
    at_all = () if norms is None else enumerate(norms)
    sick = [at for at, norm in at_all if at - 1 in watched and not np.isfinite(norm)]
    if norms is None or not sick:
        return "the hidden states' own gradients are finite", None
    last = sick[-1]  # 0 is the embeddings, n the output of layer n - 1
    if last == len(norms) - 1:
        return "it begins behind the last layer, in the final norm or the output head", None
    words = f"it begins in layer {last}: finite at its output, not so at its input"
    return words, last


def _check_growth(gradients: GradientRecord) -> list[Finding]:
    """Return a finding for each layer through which the gradient grows or shrinks too much."""
    found = []
    for layer, rate in enumerate(layer_growth(gradients)):
        if rate >= MAX_LAYER_GROWTH:
            found.append(
                _growth_finding(EXPLODING, gradients, layer, rate, f"grows {rate:.3g} times")
            )
        elif rate <= 1 / MAX_LAYER_GROWTH:
            small = f"shrinks to {f'{rate:.2g} of its size' if rate else 'nothing'}"
            found.append(_growth_finding(VANISHING, gradients, layer, rate, small))
    return found


def _growth_finding(
    id_: str, gradients: GradientRecord, layer: int, rate: float, words: str
) -> Finding:
    sentence = (
        f"The gradient of step {gradients.step}'s {_format_target(gradients)} {words} from the output of "
        f"layer {layer} back to its input (through the layers of clean models by less than 4)."
    )
    return _gradient_finding(id_, gradients, sentence, {"growth": rate}, layer, f"growth {layer}")


def _check_small_gradients(gradients: GradientRecord) -> list[Finding]:
    """Return a finding about weights without any gradient, and one about next to none."""
    weights = [stat for stat in gradients.stats if _is_checked_weight(stat)]
    zero = [stat for stat in weights if stat.norm == 0 and not _is_expected_zero(stat, weights)]
    tiny = [stat for stat in weights if 0 < stat.norm < MIN_RELATIVE_NORM * gradients.scale]
    found = []
    if zero:
        found.append(_weights_finding(DEAD, gradients, zero, "is exactly 0"))
    if tiny:
        found.append(
            _weights_finding(
                VANISHING, gradients, tiny, f"is below {MIN_RELATIVE_NORM:.0e} of the logits'"
            )
        )
    return found


def _is_checked_weight(stat: GradientStat) -> bool:
    return stat.part in _CHECKED_PARTS and "bias" not in stat.name.rpartition(".")[2]


def _is_expected_zero(stat: GradientStat, weights: Sequence[GradientStat]) -> bool:
    """Tell that queries and keys have no gradient in any layer: every row has one key alone."""
    same = [each.norm for each in weights if each.part == stat.part]
    return stat.part in ("q", "k") and not any(same) and any(each.norm for each in weights)


def _weights_finding(
    id_: str, gradients: GradientRecord, which: list[GradientStat], words: str
) -> Finding:
    where = _format_stat_layers(gradients, which)
    names = ", ".join(dict.fromkeys(_short_parameter_name(stat) for stat in which))
    sentence = (
        f"The gradient of step {gradients.step}'s {_format_target(gradients)} {words} in "
        f"{plural(len(which), 'weight')}{where}: {names}."
    )
    first = min((stat.layer for stat in which if stat.layer is not None), default=None)
    evidence = {
        "parameters": [stat.name for stat in which[:_MAX_NAMED_PARAMETERS]],
        "n_parameters": len(which),
        "largest_norm": max(stat.norm for stat in which),
        "scale": gradients.scale,
    }
    series = f"{where} {names}"
    return _gradient_finding(id_, gradients, sentence, evidence, first, series, _stat_layers(which))


def _short_parameter_name(stat: GradientStat) -> str:
    """Return "q_proj" of "model.layers.2.self_attn.q_proj.weight"."""
    parts = stat.name.split(".")
    return parts[-2] if len(parts) > 1 else stat.name


def _stat_layers(which: Sequence[GradientStat]) -> tuple[int, ...]:
    return tuple(sorted({stat.layer for stat in which if stat.layer is not None}))


def _format_stat_layers(gradients: GradientRecord, which: Sequence[GradientStat]) -> str:
    found = _stat_layers(which)
    return f" of {format_layers(found, len(_stat_layers(gradients.stats)))}" if found else ""


def _format_target(gradients: GradientRecord) -> str:
    return "log-probability" if gradients.target == "logprob" else "margin"


def _gradient_finding(
    id_: str,
    gradients: GradientRecord,
    sentence: str,
    evidence: dict[str, Any],
    layer: int | None = None,
    series: str = "",
    several: tuple[int, ...] = (),
) -> Finding:
    return Finding(
        id=id_,
        severity=GradientsRule.findings[id_].severity,
        sentence=sentence,
        generation=gradients.generation,
        branch=gradients.branch,
        step=gradients.step,
        layer=layer,
        evidence=evidence,
        layers=several if len(several) > 1 else (),
        series=series,
    )
