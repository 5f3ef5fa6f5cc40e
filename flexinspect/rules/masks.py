"""The mask that ran against the one that was meant: per layer, head and step.

What is judged is `MaskRecord.cells`, what the kernel honoured; what was received says why it is so.
Where no mask was declared, segments that were named stand for one (their leaks are warnings), and
a layer that calls itself causal for causality. Layers that ran the same mask share a finding, and
what comes back at later steps is counted, not told again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from flexinspect.findings import Finding, Severity
from flexinspect.masks import BoolArray, MaskRule
from flexinspect.prompts import SegmentKind
from flexinspect.records import CallRecord, MaskRecord, StepRecord
from flexinspect.rules import maskdiff, maskkinds
from flexinspect.rules.base import FindingKind, Rule
from flexinspect.rules.maskdiff import CAUSAL, OPEN, Difference, Frame
from flexinspect.rules.maskwords import Group, Seen, Told
from flexinspect.rules.scene import Scene

_CAUSAL = MaskRule("causal", (0,), (0,), (0,))
_KEPT_RULES = 8
_KNOWN = 1024


class MasksRule(Rule):
    """Compares the cells that ran with the declared mask; from level advanced on."""

    name: ClassVar[str] = "masks"
    findings: ClassVar[Mapping[str, FindingKind]] = maskkinds.MASKS

    def __init__(self) -> None:
        self._earlier: deque[tuple[int, MaskRule]] = deque(maxlen=_KEPT_RULES)
        self._right: set[tuple[object, ...]] = set()
        self._real: BoolArray | None = None
        self._told: dict[tuple[object, ...], str] = {}

    def begin(self, scene: Scene) -> None:
        """Begin with nothing told; remember what earlier generations meant."""
        before = getattr(self, "scene", None)
        super().begin(scene)
        if before is not None and self._rule is not None:
            self._remember(self._number, self._rule)
        intent = scene.intent
        self._number = scene.generation.generation
        self._rule = intent.rule if intent is not None else None
        self._told = {}
        self._real = _without_padding(scene)
        self._words = Told(scene)
        if len(self._right) > _KNOWN:
            self._right.clear()

    def _remember(self, number: int, rule: MaskRule) -> None:
        if all(rule != known for _, known in self._earlier):
            self._earlier.append((number, rule))
