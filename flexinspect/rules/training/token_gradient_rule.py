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
from typing import Any

import numpy as np

from flexinspect.core.text import capitalize, format_layers, plural
from flexinspect.records import imported
from flexinspect.records.finding import Finding
from flexinspect.records.step import GradientRecord, GradientStat
from flexinspect.rules.engine import Findings, Rule, finding_kinds

MAX_LAYER_GROWTH = 100.0
"""Growth of a hidden state's gradient through one layer from which it explodes, and whose inverse
is the shrinking from which it vanishes. Measured: 0.9 to 1.3 in the demo model, 1.1 to 3 in random
models of seven families."""
MIN_RELATIVE_NORM = 1e-6
"""Norm of a weight's gradient, relative to that at the logits, below which it vanishes: the
threshold that training tools use for absolute norms. Clean models stay above 0.1."""
_CHECKED_PARTS = ("q", "k", "v", "qkv", "o", "mlp")  # gradients of norms and biases may be small
_MAX_NAMED_PARAMETERS = 6


class GradientsRule(Rule):
    """Checks the gradients of generated tokens, which are recorded with `--grads`."""

    name = "gradients"
    needs = (imported.GRADIENTS,)
    findings = finding_kinds("gradient.*")

    def on_gradients(self, gradients: GradientRecord) -> Findings:
        """Check the gradients of one token."""
        if anomaly := gradients.anomaly:
            message, *_ = anomaly.splitlines()
            parts = message.split("'")  # Function 'SqrtBackward0' returned nan values in its ...
            function = parts[1] if len(parts) > 2 else message
            sentence = f"Autograd's anomaly mode at step {gradients.step}: {message}"
            facts, id_ = {"function": function, "anomaly_message": anomaly}, "gradient.anomaly"
            yield self.finding(gradients, id_, sentence, evidence=facts, series=function)
        bad = [stat for stat in gradients.stats if stat.n_nan or stat.n_inf]
        if not gradients.matches_recorded:
            error, tolerance, path = gradients.logits_error, gradients.tolerance, gradients.path
            sentence = (
                f"The forward to differentiate for step {gradients.step} ({path}) is not what ran: "
                f"its logits differ by {error:.2g} of the largest recorded one, but rounding "
                f"explains at most {tolerance:.0e}."
            )
            evidence = {"check_error": error, "tolerance": tolerance, "path": path}
            id_ = "gradient.check-failed"
            yield self.finding(gradients, id_, sentence, evidence=evidence, series="check")
        elif bad:
            yield self._nonfinite_finding(gradients, bad)
        elif 0 < gradients.scale < math.inf:  # else the probability is exactly 1: all are 0
            yield from self._check_growth(gradients)
            yield from self._check_small_gradients(gradients)

    def _nonfinite_finding(self, gradients: GradientRecord, bad: Sequence[GradientStat]) -> Finding:
        kind = "NaN" if any(stat.n_nan for stat in bad) else "Inf"
        start, layer = _find_gradient_origin(gradients)
        sentence = (
            f"{kind} is in {_format_target(gradients)}: in {len(bad)} of "
            f"{plural(len(gradients.stats), 'parameter')}{_format_stat_layers(gradients, bad)}; "
            f"{start}."
        )
        counts = {name: sum(getattr(stat, name) for stat in bad) for name in ("n_nan", "n_inf")}
        id_, layers = f"gradient.{kind.lower()}", () if layer is None else (layer,)
        options: dict[str, Any] = {"evidence": _name_parameters(bad) | counts, "layers": layers}
        return self.finding(gradients, id_, sentence, series=f"{kind} {layer}", **options)

    def _check_growth(self, gradients: GradientRecord) -> Findings:
        """Report each layer through which the gradient grows or shrinks too much."""
        for layer, rate in enumerate(layer_growth(gradients)):
            if rate >= MAX_LAYER_GROWTH:
                finding_id, words = "gradient.exploding", f"grows {rate:.3g} times"
            elif rate <= 1 / MAX_LAYER_GROWTH:
                rest = f"{rate:.2g} of its size" if rate else "0"
                finding_id, words = "gradient.vanishing", f"shrinks to {rest}"
            else:
                continue
            sentence = (
                f"{capitalize(_format_target(gradients))} {words} from the output of layer {layer} "
                "back to its input (through the layers of clean models by less than 4)."
            )
            facts, series = {"growth": rate}, f"growth {layer}"
            yield self.finding(gradients, finding_id, sentence, (layer,), facts, series=series)

    def _check_small_gradients(self, gradients: GradientRecord) -> Findings:
        """Report weights with zero gradients, and weights with vanishing gradients."""
        scale = gradients.scale
        checked = (stat for stat in gradients.stats if stat.part in _CHECKED_PARTS)
        weights = [stat for stat in checked if "bias" not in stat.name.rpartition(".")[2]]
        zero = [stat for stat in weights if stat.norm == 0 and not _is_expected_zero(stat, weights)]
        tiny = [stat for stat in weights if 0 < stat.norm < MIN_RELATIVE_NORM * scale]
        for finding_id, which, words in (
            ("gradient.dead", zero, "is exactly 0"),
            ("gradient.vanishing", tiny, f"is below {MIN_RELATIVE_NORM:.0e} of the logits'"),
        ):
            if not which:
                continue
            where = _format_stat_layers(gradients, which)
            # "q_proj" from "model.layers.2.self_attn.q_proj.weight"
            names = ", ".join(dict.fromkeys(stat.name.split(".")[-2:][0] for stat in which))
            target, count = capitalize(_format_target(gradients)), plural(len(which), "weight")
            sentence = f"{target} {words} in {count}{where}: {names}."
            largest = max(stat.norm for stat in which)
            evidence = {**_name_parameters(which), "largest_norm": largest, "scale": scale}
            options: dict[str, Any] = {"layers": _stat_layers(which), "series": f"{where} {names}"}
            yield self.finding(gradients, finding_id, sentence, evidence=evidence, **options)


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


def _find_gradient_origin(gradients: GradientRecord) -> tuple[str, int | None]:
    """Where in the backward it begins, and the layer, None outside the layers."""
    if gradients.value != gradients.value or not math.isfinite(gradients.scale):
        return "the logits are already not finite, so it comes from the forward", None
    norms = () if gradients.layers is None else gradients.layers
    watched = {-1, *(stat.layer for stat in gradients.stats)}
    nonfinite = [n for n, norm in enumerate(norms) if n - 1 in watched and not np.isfinite(norm)]
    if not nonfinite:
        return "the gradients of the hidden states are finite", None
    last = nonfinite[-1]  # 0 is the embeddings, n the output of layer n - 1
    if last == len(norms) - 1:
        return "it begins after the last layer, in the final norm or the output head", None
    return f"it begins in layer {last}: finite at its output, but not at its input", last


def _is_expected_zero(stat: GradientStat, weights: Sequence[GradientStat]) -> bool:
    """Whether q or k has zero gradients in all layers: every row has a single key."""
    same = [each.norm for each in weights if each.part == stat.part]
    return stat.part in ("q", "k") and not any(same) and any(each.norm for each in weights)


def _stat_layers(which: Sequence[GradientStat]) -> tuple[int, ...]:
    return tuple(sorted({stat.layer for stat in which if stat.layer is not None}))


def _format_stat_layers(gradients: GradientRecord, which: Sequence[GradientStat]) -> str:
    found = _stat_layers(which)
    return f" of {format_layers(found, len(_stat_layers(gradients.stats)))}" if found else ""


def _format_target(gradients: GradientRecord) -> str:
    target = "log-probability" if gradients.target == "logprob" else "margin"
    return f"the gradient of step {gradients.step}'s {target}"


def _name_parameters(which: Sequence[GradientStat]) -> dict[str, Any]:
    names = [stat.name for stat in which[:_MAX_NAMED_PARAMETERS]]
    return {"parameters": names, "n_parameters": len(which)}
