"""Paths of the repository, for tests at any depth."""

from __future__ import annotations

from pathlib import Path

import flexinspect

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
DOCS = REPOSITORY / "docs"
CASES = TESTS / "cases"
DEMO = Path(flexinspect.__file__).parent / "data" / "demo"
"""The shipped model."""
