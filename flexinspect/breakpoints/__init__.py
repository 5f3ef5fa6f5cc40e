"""Breakpoints on what the model does: an expression language, and the book of those that are set.

Expressions are read here and judged on records; nothing of them is ever run as Python. No torch,
no files.
"""

from __future__ import annotations

from flexinspect.breakpoints.completion import Completion, complete
from flexinspect.breakpoints.evaluation import (
    EvaluationResult,
    Observation,
    StepObservations,
    Unknown,
    evaluate,
    evaluate_with_layer,
    observe_step,
)
from flexinspect.breakpoints.grammar import parse
from flexinspect.breakpoints.store import Breakpoint, BreakpointStore, HitAction
from flexinspect.breakpoints.syntax_tree import Expression, ExpressionError, to_text

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
