"""Breakpoints on what the model does: an expression language, and the book of those that are set.

Expressions are read here and judged on records; nothing of them is ever run as Python. No torch,
no files.
"""

from __future__ import annotations

from flexinspect.breaks.book import Breakpoint, BreakpointStore, HitAction
from flexinspect.breaks.complete import Completion, complete
from flexinspect.breaks.errors import ExpressionError
from flexinspect.breaks.evaluate import EvaluationResult, Unknown, evaluate, evaluate_with_layer
from flexinspect.breaks.facts import Observation, StepObservations, observe_step
from flexinspect.breaks.parser import parse
from flexinspect.breaks.tree import Expression, to_text

__all__ = [
    "Breakpoint",
    "BreakpointStore",
    "Completion",
    "EvaluationResult",
    "Expression",
    "ExpressionError",
    "HitAction",
    "Observation",
    "StepObservations",
    "Unknown",
    "complete",
    "evaluate",
    "evaluate_with_layer",
    "observe_step",
    "parse",
    "to_text",
]
