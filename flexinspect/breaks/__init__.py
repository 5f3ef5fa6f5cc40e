"""Breakpoints on what the model does: an expression language, and the book of those that are set.

Expressions are read here and judged on records; nothing of them is ever run as Python. No torch,
no files.
"""

from __future__ import annotations

from flexinspect.breaks.book import Action, Breakpoint, BreakpointBook
from flexinspect.breaks.complete import Completion, complete
from flexinspect.breaks.errors import ExpressionError
from flexinspect.breaks.evaluate import Unknown, Verdict, evaluate, judge
from flexinspect.breaks.facts import Facts, Sighting, facts_of
from flexinspect.breaks.parser import parse
from flexinspect.breaks.tree import Expression, to_text

__all__ = [
    "Action",
    "Breakpoint",
    "BreakpointBook",
    "Completion",
    "Expression",
    "ExpressionError",
    "Facts",
    "Sighting",
    "Unknown",
    "Verdict",
    "complete",
    "evaluate",
    "facts_of",
    "judge",
    "parse",
    "to_text",
]
