"""Paths of the repository, for tests at any depth."""

from __future__ import annotations

from pathlib import Path

import flexinspect

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
DOCS = REPOSITORY / "docs"
CASES = TESTS / "cases"
SHARED = "FLEXINSPECT_TESTS_SHARED"
"""The variable that names the folder which all processes of one run of the tests share."""
DEMO = Path(flexinspect.__file__).parent / "data" / "demo"
"""The shipped model."""
