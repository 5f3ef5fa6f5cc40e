"""What every test file starts from."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from support import warm_python
from support.paths import SHARED, TESTS

RUNS_MODELS = re.compile(
    r"^\s*(?:import|from) (?:torch|transformers|subprocess|pty|flexinspect_hooks"
    r"|support\.(?:adapters|captures|cases|controlled|dap|debugged|differentiated"
    r"|model_fixtures|nets|ownmasks|patches|planted_leaks|planting|tiny|warm_python))\b",
    re.M,
)
"""What a test file imports that loads torch or starts a process."""


os.environ["CUDA_VISIBLE_DEVICES"] = ""
"""The suite tests what runs anywhere, in forked processes, which cannot use CUDA after their parent
did. What needs a GPU is in `benchmarks.gpu`."""

settings.register_profile("suite", derandomize=True, deadline=None)
settings.register_profile("search", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))
"""The suite tries the same examples each time; `HYPOTHESIS_PROFILE=search` tries new ones."""

SLOW_FOLDERS = ("cases", "cli", "docs", "end_to_end", "hooks", "tui")
SLOW_FILES = ("test_torture.py", "test_clean_generations.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--fast`: only files that load no torch and start no process, without slow tests."""
    parser.addoption("--fast", action="store_true", help="skip what is slow or loads torch")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the files that `--fast` leaves out."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.getoption("--fast") and is_test:
        return RUNS_MODELS.search(collection_path.read_text("utf-8")) is not None or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that start processes, so that no worker ends with a long one."""
    if config.getoption("--fast"):
        items[:] = [item for item in items if item.get_closest_marker("slow") is None]

    def is_quick(item: pytest.Item) -> bool:
        folder = item.path.relative_to(TESTS).parts[0]
        return folder not in SLOW_FOLDERS and item.path.name not in SLOW_FILES

    items.sort(key=is_quick)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Search no garbage in the hundred thousands of objects of torch and of all test files.

    Of the time of a worker, garbage collection would take a third before the first test (where no
    bytecode of the tests is cached yet), and a tenth in the tests.
    """
    gc.disable()
    yield
    _freeze_objects()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Report what the garbage of the tests raises; pytest searches for more of it five times."""
    _freeze_objects()


def _freeze_objects() -> None:
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder that the processes of these tests share; workers inherit its name."""
    if not hasattr(config, "workerinput"):
        folder = os.environ[SHARED] = tempfile.mkdtemp(prefix="flexinspect-tests-")
        Path(folder, "pid").write_text(str(os.getpid()), "utf-8")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove that folder."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(SHARED), ignore_errors=True)


@pytest.fixture
def forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the capture processes that a test starts from one that has torch loaded."""
    from flexinspect.launch import child_process

    warm = SimpleNamespace(**{**vars(subprocess), "Popen": warm_python.Popen})
    monkeypatch.setattr(child_process, "subprocess", warm)


@pytest.fixture(autouse=True, scope="module")
def _no_graphs_of_other_files() -> Iterator[None]:
    """Forget compiled graphs between files.

    Uncompiled FlexAttention is traced by dynamo too. Asking why an old graph does not fit a new
    call, torch 2.13 evaluates names of the old call on the new one's arguments, and raises a
    `TypeError` where one of them is None: whether a file passes would depend on those before it.
    """
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Undo what a test did to signals: processes of later tests inherit an ignored one."""
    numbers = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _attention_functions() -> Iterator[None]:
    """Fail a test that leaves transformers' names of attention functions changed.

    A name that is set on the registry itself hides what later tests register under it.
    """
    yield
    if (modeling := sys.modules.get("transformers.modeling_utils")) is not None:
        left = modeling.ALL_ATTENTION_FUNCTIONS._local_mapping
        names = sorted(left)
        left.clear()
        assert names == []
