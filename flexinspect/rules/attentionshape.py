"""The shape of the newest row's attention: all on one key, all on BOS, the same on every key.

A head that looks at one key, or at BOS alone, is what trained models have by the dozen. So what is
judged is all heads at once, over several steps, and only where the row may look at several keys:
what a mask closes is the mask's matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from flexinspect.findings import Finding, Severity
from flexinspect.prompts import SegmentKind
from flexinspect.records import StepRecord
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.newestrow import ROW_STREAMS, NewestRow, newest_row, open_keys
from flexinspect.rules.scene import Scene
from flexinspect.rules.words import counted
from flexinspect.rules.words import layers as in_layers

SINK = "attention.sink"
COLLAPSED = "attention.collapsed"
UNIFORM = "attention.uniform"
LSE = "attention.lse"

SINK_SHARE = 0.99
ONE_KEY = 0.01
"""Nats: the entropy of 0.999 on one key and the rest on up to a thousand others is below it."""
SEVERAL = 3
"""Steps in a row that make a habit."""
LAYER_STEPS = 4
EVERY = 4
"""Single layers are looked at in the first steps, and then in each of so many."""
EQUAL = 2e-5
"""How far from log(n) an entropy may be by rounding."""
ZERO = 3e-6
OFFSET = 0.05
"""Scores are the same when they are all 0, or all far from it: small random weights give scores
that are close to 0 and to each other, and are no fault."""
UNIFORM_TOKENS = 2
"""Different tokens that must have been fed for it."""
FEW_KEYS = 4
"""Fewer keys than these are not enough to speak of a distribution."""
GATE = 1e-2

_ROWS = (
    "SELECT step, stream, dtype, shape, codec, data FROM arrays WHERE generation = {generation} "
    "AND branch = {branch} AND step = {step} AND stream IN ('attention.entropy', 'attention.mass')"
)


@dataclass(slots=True)
class _Runs:
    """In how many steps in a row something was seen, by what."""

    collapsed: int = 0
    sink: int = 0
    layers: dict[int, int] = field(default_factory=dict)
    uniform: dict[int, set[int]] = field(default_factory=dict)
    """By layer: the tokens fed in the last steps in a row that were uniform."""


class AttentionShapeRule(Rule):
    """Looks at entropy, mass and log-sum-exp of the newest row, from level advanced on."""

    name: ClassVar[str] = "attention shape"
    streams: ClassVar[tuple[str, ...]] = ROW_STREAMS
    findings: ClassVar[Mapping[str, FindingKind]] = {
        SINK: FindingKind(
            Severity.NOTE,
            "every head of every layer gives nearly all of its attention to the first token",
            why=(
                "The first token is where heads look that have nothing to say; when all of them "
                "do, the generated rows read nothing of the prompt."
            ),
            confirm=(
                "Look at the row of the step in the attention panel: the share of BOS stands first."
            ),
            fix=(
                "Compare with a run under plain causal attention: if the share is lower there, the "
                "mask keeps the prompt from the generated rows; else the model was not trained for "
                "such a prompt."
            ),
            query=_ROWS,
        ),
        COLLAPSED: FindingKind(
            Severity.WARNING,
            "heads that all put more than 0.999 on one key, though others are open",
            why=(
                "Softmax over scores that are far too large is a choice of one key: the attention "
                "of the whole model then mixes nothing."
            ),
            confirm=(
                "Look at entropy in the attention panel: 0 in each head; and at attention.lse, "
                "which is then the largest score itself, in the hundreds or more."
            ),
            fix=(
                "Look for a scale that is applied twice or not at all (1/sqrt(head_dim)), for "
                "norms of queries or keys that were left out, or weights of another model."
            ),
            query=_ROWS,
        ),
        UNIFORM: FindingKind(
            Severity.WARNING,
            "a layer in which every head gives every key the same weight",
            why=(
                "Equal weights mean that all scores are the same: what the keys hold plays no "
                "part, and the layer gives each row the mean of the values."
            ),
            confirm=(
                "The entropy in the attention panel equals log of the number of open keys, to five "
                "digits, in each head."
            ),
            fix=(
                "Look for queries or keys that are zero (weights not loaded, a buffer never "
                "written), a scale of 0, or scores that all lie at a cap."
            ),
            query=_ROWS,
        ),
        LSE: FindingKind(
            Severity.WARNING,
            "a log-sum-exp that is infinite in a row that sees keys",
            why=(
                "The log-sum-exp of finite scores is finite, so some score of this row is not: the "
                "weights of its head are NaN, or all on keys of infinite score."
            ),
            confirm=(
                "Read the array attention.lse of the step: one number per call and head; at level "
                "extreme, q and k of the layer show where they are too large."
            ),
            fix=(
                "Compute scores in float32, or look for a bias that adds -Inf to open cells and "
                "for keys that were never written."
            ),
            query=(
                "SELECT layer, path, dtype, scale, gate, gate_kind FROM calls WHERE generation = "
                "{generation} AND branch = {branch} AND step = {step} AND layer = {layer}"
            ),
        ),
    }

    def begin(self, scene: Scene) -> None:
        """Begin with nothing seen."""
        super().begin(scene)
        self._runs: dict[int, _Runs] = {}
        first = scene.segments[0] if scene.segments else None
        self._has_bos = first is not None and first.kind is SegmentKind.BOS and len(first) == 1

    def look(self, step: StepRecord) -> Sequence[Finding]:
        """Return what the newest row's attention is, where that is no attention any more."""
        row = newest_row(step)
        if row is None:
            return ()
        if not math.isfinite(float(row.lse.sum())):
            return self._not_finite(step, row)
        runs = self._runs.get(step.branch)
        if runs is None:
            runs = self._runs[step.branch] = _Runs()
        found: list[Finding] = []
        if step.phase == "decode":
            found += self._everywhere(step, runs, row)
        if step.step < EVERY or step.step % EVERY == 0:
            found += self._layer_by_layer(step, runs, row)
        return found

    def _everywhere(self, step: StepRecord, runs: _Runs, row: NewestRow) -> list[Finding]:
        """Say what holds of all heads of all layers; the first head settles most steps."""
        is_collapsed = (
            float(row.entropy[0, 0]) < ONE_KEY
            and float(row.entropy.max()) < ONE_KEY
            and self._is_open(step)
        )
        runs.collapsed = runs.collapsed + 1 if is_collapsed else 0
        if runs.collapsed >= SEVERAL:
            return [self._collapsed(step, runs)]
        if not self._has_bos or float(row.mass[0, 0, 0]) <= SINK_SHARE:
            runs.sink = 0
            return []
        share = float(row.mass[:, :, 0].min())
        runs.sink = runs.sink + 1 if share > SINK_SHARE and self._is_open(step) else 0
        return [self._bos(step, runs, share)] if runs.sink >= SEVERAL else []

    def _layer_by_layer(self, step: StepRecord, runs: _Runs, row: NewestRow) -> list[Finding]:
        """Say what holds of all heads of single layers: not in every step, as it costs more."""
        high = row.entropy.max(axis=1).tolist()
        low = row.entropy.min(axis=1).tolist()
        found = self._uniform(step, runs, row, low, high)
        if step.phase == "decode" and self._has_bos and not runs.collapsed and not runs.sink:
            found += self._one_layer(step, runs, row, high)
        return found

    def _is_open(self, step: StepRecord) -> bool:
        """Whether the newest row may look at several keys in every layer."""
        for number in range(len(step.calls)):
            n_open = open_keys(step, self.scene, number)
            if n_open is None or n_open.min() < FEW_KEYS:
                return False
        return True

    # -- one key, BOS ----------------------------------------------------------------------------

    def _collapsed(self, step: StepRecord, runs: _Runs) -> Finding:
        n_layers = len({call.layer for call in step.calls})
        sentence = (
            f"Every head of {in_layers(range(n_layers), n_layers)} puts more than 0.999 of its "
            f"attention on one key in {runs.collapsed} steps in a row (up to step {step.step}), "
            f"though up to {step.kv_after} keys are open: softmax has become a choice."
        )
        evidence = {"steps": runs.collapsed}
        return self._finding(step, COLLAPSED, sentence, evidence, [])

    def _bos(self, step: StepRecord, runs: _Runs, share: float) -> Finding:
        sentence = (
            f"Every head of every layer gives BOS at least {share:.3f} of its attention in "
            f"{runs.sink} generated rows in a row (up to step {step.step}): of "
            f"{counted(step.kv_after - 1, 'other key')} next to nothing is read."
        )
        evidence = {"share": share, "steps": runs.sink}
        return self._finding(step, SINK, sentence, evidence, [])

    def _one_layer(
        self, step: StepRecord, runs: _Runs, row: NewestRow, high: list[float]
    ) -> list[Finding]:
        """Say of single layers whose heads all look at one key that is not BOS: a note."""
        if min(high) >= ONE_KEY:
            runs.layers.clear()
            return []
        numbers = [number for number, entropy in enumerate(high) if entropy < ONE_KEY]
        sharp = {
            step.calls[number].layer
            for number in numbers
            if float((row.mass[number, :, 0] > 0.5).mean()) < 0.5
            and self._sees_several(step, number)
        }
        runs.layers = {layer: runs.layers.get(layer, 0) + 1 for layer in sharp}
        which = sorted(layer for layer, n in runs.layers.items() if n >= LAYER_STEPS)
        if not which:
            return []
        n_layers = len({call.layer for call in step.calls})
        sentence = (
            f"Every head of {in_layers(which, n_layers)} puts more than 0.999 of its attention on "
            f"one key, and not on BOS, in {LAYER_STEPS} steps looked at in a row (up to step "
            f"{step.step})."
        )
        evidence = {"layers": which, "steps": LAYER_STEPS}
        note = Severity.NOTE
        return [self._finding(step, COLLAPSED, sentence, evidence, which, severity=note)]

    def _sees_several(self, step: StepRecord, number: int) -> bool:
        n_open = open_keys(step, self.scene, number)
        return n_open is not None and int(n_open.min()) >= FEW_KEYS

    # -- the same on every key -------------------------------------------------------------------

    def _uniform(
        self,
        step: StepRecord,
        runs: _Runs,
        row: NewestRow,
        low: list[float],
        high: list[float],
    ) -> list[Finding]:
        flat = [n for n, (a, b) in enumerate(zip(low, high, strict=True)) if b - a < EQUAL < b]
        if not flat:
            if runs.uniform:
                runs.uniform.clear()
            return []
        token = self.scene.token(step.kv_after - 1)
        if token is None:
            return []
        # One token alone may be blank by design: the embedding of padding is zero.
        seen = {step.calls[n].layer for n in flat if self._is_uniform(step, n, row)}
        seen -= {stat.layer + 1 for stat in step.layer_stats if stat.min == stat.max}
        runs.uniform = {layer: runs.uniform.get(layer, set()) | {token.token_id} for layer in seen}
        which = sorted(layer for layer, ids in runs.uniform.items() if len(ids) >= UNIFORM_TOKENS)
        if not which:
            return []
        number = next(n for n, call in enumerate(step.calls) if call.layer == which[0])
        n_keys = round(math.exp(high[number]))
        n_layers = len({call.layer for call in step.calls})
        sentence = (
            f"Every head of {in_layers(which, n_layers)} gives each of the {n_keys} keys open to "
            f"the newest row of step {step.step} the same weight (1/{n_keys}), whatever token is "
            "fed: its scores do not depend on the keys."
        )
        evidence = {"entropy": high[number], "keys": n_keys}
        return [self._finding(step, UNIFORM, sentence, evidence, which)]

    def _is_uniform(self, step: StepRecord, number: int, row: NewestRow) -> bool:
        """Compare with the open keys; scores at their cap are told of elsewhere."""
        n_open = open_keys(step, self.scene, number)
        if n_open is None or n_open.min() < FEW_KEYS or step.calls[number].softcap is not None:
            return False
        most = np.log(n_open)
        offset = np.abs(row.lse[number] - most)
        are_the_same = bool(((offset < ZERO) | (offset > OFFSET)).all())
        return are_the_same and float(np.abs(most - row.entropy[number]).max()) < EQUAL

    # -- log-sum-exp -----------------------------------------------------------------------------

    def _not_finite(self, step: StepRecord, row: NewestRow) -> list[Finding]:
        """Say what is infinite in a row that sees keys; NaN is told of by another rule."""
        sick = min(
            (stat.layer for stat in step.layer_stats if stat.n_nan or stat.n_inf), default=None
        )
        for number, call in enumerate(step.calls):
            lse = row.lse[number]
            bad = np.flatnonzero(np.isinf(lse))
            if not len(bad) or call.gate is None or not call.gate <= GATE:
                continue
            if sick is not None and call.layer >= sick:
                return []
            n_open = open_keys(step, self.scene, number)
            if n_open is None:
                continue
            bad = bad[np.broadcast_to(n_open, lse.shape)[bad] > 0]
            if len(bad):
                return [self._lse(step, number, lse, bad.tolist(), int(n_open.max()))]
        return []

    def _lse(self, step: StepRecord, number: int, lse: Any, bad: list[int], n_open: int) -> Finding:
        call, first = step.calls[number], float(lse[bad[0]])
        heads = f"head {bad[0]}" if len(bad) == 1 else f"{len(bad)} of {len(lse)} heads"
        what = "+Inf" if first > 0 else "-Inf"
        sentence = (
            f"The log-sum-exp of the newest row is {what} in {heads} of layer {call.layer} in step "
            f"{step.step}, though the row sees {counted(n_open, 'key')}."
        )
        evidence = {"heads": bad, "lse": first, "open": n_open}
        head = bad[0] if len(bad) == 1 else None
        return self._finding(step, LSE, sentence, evidence, [call.layer], head=head)

    def _finding(
        self,
        step: StepRecord,
        finding_id: str,
        sentence: str,
        evidence: dict[str, Any],
        which: Sequence[int],
        *,
        head: int | None = None,
        severity: Severity | None = None,
    ) -> Finding:
        return self.finding(
            step,
            finding_id,
            sentence,
            severity=severity,
            layers=which,
            head=head,
            positions=(step.kv_after - 1,),
            evidence=evidence,
            series=f"layer {which[0]}" if which else "all",
        )


RULE: type[Rule] = AttentionShapeRule
