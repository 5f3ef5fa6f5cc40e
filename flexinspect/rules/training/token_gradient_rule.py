"""Checks the gradients of generated tokens: NaN, Inf, exploding, vanishing, and zero gradients.

The absolute size of a gradient means little: for a token with a probability near 1 it is tiny. So
all sizes are relative to the gradient at the logits. For hidden states the rule checks how much
the gradient grows from a layer's output to its input, as in Pascanu, Mikolov and Bengio 2013 (On
the difficulty of training recurrent neural networks): through a residual layer of a clean model it
stays within a factor of 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from flexinspect.core.text import format_layers, plural
from flexinspect.records.finding import Finding
from flexinspect.records.token_gradients import GradientRecord, GradientStat
from flexinspect.rules.engine import Rule, finding_kinds

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
"""Parts whose matrices are checked; small gradients of norms and biases are not a fault."""
_MAX_NAMED_PARAMETERS = 6


class GradientsRule(Rule):
    """Checks the gradients of generated tokens, which are recorded with `--grads`."""

    name: ClassVar[str] = "gradients"
    findings = finding_kinds(
        *(GRADIENT_NAN, GRADIENT_INF, EXPLODING, VANISHING, DEAD, FORWARD_CHECK, ANOMALY)
    )

    def on_gradients(self, gradients: GradientRecord) -> Sequence[Finding]:
        """Check the gradients of one token."""
        found = [_anomaly_finding(gradients)] if gradients.anomaly else []
        if not gradients.matches_recorded:
            return [*found, _forward_check_finding(gradients)]
        bad = [stat for stat in gradients.stats if stat.n_nan or stat.n_inf]
        if bad:
            return [*found, _nonfinite_gradient_finding(gradients, bad)]
        if not 0 < gradients.scale < math.inf:
            return found  # the probability is exactly 1, so all gradients are 0
        return [*found, *_check_growth(gradients), *_check_small_gradients(gradients)]


def layer_growth(gradients: GradientRecord) -> list[float]:
    """By layer, how much the gradient grows from its output to its input; NaN if unknown.

    For layer 0 it is unknown unless it is 0, because its input is small embeddings that the first
    norm scales up.
    """
    if gradients.layers is None or len(gradients.layers) < 2:
        return []
    at_input, *outputs = gradients.layers
    norms = np.asarray(outputs, np.float64)
    with np.errstate(all="ignore"):
        rates = norms[:-1] / norms[1:]
    return [0.0 if at_input == 0 < norms[0] else math.nan, *(float(rate) for rate in rates)]


def _anomaly_finding(gradients: GradientRecord) -> Finding:
    message, *_ = (gradients.anomaly or "").splitlines()
    function = _anomaly_function(message)
    evidence = {"function": function, "anomaly_message": gradients.anomaly}
    sentence = f"Autograd's anomaly mode at step {gradients.step}: {message}"
    return _gradient_finding(ANOMALY, gradients, sentence, evidence, series=function)


def _anomaly_function(message: str) -> str:
    """The name in "Function 'SqrtBackward0' returned nan values in its 0th output."."""
    parts = message.split("'")
    return parts[1] if len(parts) > 2 else message


def _forward_check_finding(gradients: GradientRecord) -> Finding:
    sentence = (
        f"The forward to differentiate for step {gradients.step} ({gradients.path}) is not what "
        f"ran: its logits differ by {gradients.logits_error:.2g} of the largest recorded one, but "
        f"rounding explains at most {gradients.tolerance:.0e}."
    )
    evidence = {
        "check_error": gradients.logits_error,
        "tolerance": gradients.tolerance,
        "path": gradients.path,
    }
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
    """Where in the backward it begins, and the layer, None outside the layers."""
    if gradients.value != gradients.value or not math.isfinite(gradients.scale):
        return "the logits are already not finite, so it comes from the forward", None
    norms = gradients.layers
    watched = {-1, *(stat.layer for stat in gradients.stats)}
    numbered = () if norms is None else enumerate(norms)
    nonfinite = [at for at, norm in numbered if at - 1 in watched and not np.isfinite(norm)]
    if norms is None or not nonfinite:
        return "the gradients of the hidden states are finite", None
    last = nonfinite[-1]  # 0 is the embeddings, n the output of layer n - 1
    if last == len(norms) - 1:
        return "it begins after the last layer, in the final norm or the output head", None
    return f"it begins in layer {last}: finite at its output, but not at its input", last


def _check_growth(gradients: GradientRecord) -> list[Finding]:
    """A finding for each layer through which the gradient grows or shrinks too much."""
    found = []
    for layer, rate in enumerate(layer_growth(gradients)):
        if rate >= MAX_LAYER_GROWTH:
            found.append(
                _growth_finding(EXPLODING, gradients, layer, rate, f"grows {rate:.3g} times")
            )
        elif rate <= 1 / MAX_LAYER_GROWTH:
            small = f"shrinks to {f'{rate:.2g} of its size' if rate else '0'}"
            found.append(_growth_finding(VANISHING, gradients, layer, rate, small))
    return found


def _growth_finding(
    id_: str, gradients: GradientRecord, layer: int, rate: float, words: str
) -> Finding:
    sentence = (
        f"The gradient of step {gradients.step}'s {_format_target(gradients)} {words} from the "
        f"output of layer {layer} back to its input (through the layers of clean models by less "
        "than 4)."
    )
    return _gradient_finding(id_, gradients, sentence, {"growth": rate}, layer, f"growth {layer}")


def _check_small_gradients(gradients: GradientRecord) -> list[Finding]:
    """A finding about weights with zero gradients, and one about vanishing gradients."""
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
    """Whether q or k has zero gradients in all layers: every row has a single key."""
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
    """ "q_proj" from "model.layers.2.self_attn.q_proj.weight"."""
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
