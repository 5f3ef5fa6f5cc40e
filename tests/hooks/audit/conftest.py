"""The audit of code in the process of a test."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.audits import Audit, make_audit
from support.weight_fixtures import made

__all__ = ["made"]


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    """Run code that calls a model, and audit its steps afterwards."""
    return make_audit(tmp_path)
