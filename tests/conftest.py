"""What every test file starts from."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest
from support.cases import SHARED


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder that the processes of these tests share; those beside us inherit its name."""
    if not hasattr(config, "workerinput"):
        os.environ[SHARED] = tempfile.mkdtemp(prefix="flexinspect-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Take it away."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(SHARED), ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def _no_graphs_of_other_files() -> Iterator[None]:
    """Forget compiled graphs between files.

    Uncompiled FlexAttention is traced by dynamo too. Asking why an old graph does not fit a new
    call, torch 2.13 evaluates names of the old call on the new one's arguments, and raises a
    `TypeError` where one of them is None: whether a file passes would hang on those before it.
    """
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
