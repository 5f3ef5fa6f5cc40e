"""Breakpoints on what the model does: an expression language, and the store of a run's breakpoints.

Expressions are parsed here and evaluated on records; they never run as Python. No torch, no files.
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
