"""The debuggers are importable from `flexinspect`, and importing it does not load torch."""

from __future__ import annotations

import inspect
import subprocess
import sys

import flexinspect
from flexinspect_hooks import training_debuggers

NAMES = [
    "DebugLevel",
    "PyTorchDebugger",
    "debug_context",
    "TrainingDebugger",
    "DiffusionModelDebugger",
    "AsyncTrainingLogger",
    "TrainingPhase",
]


def test_every_specified_name_is_exported() -> None:
    for name in NAMES:
        assert name in flexinspect.__all__
        assert getattr(flexinspect, name).__name__ == name


def test_both_packages_export_the_same_names() -> None:
    for name in training_debuggers.__all__:
        assert getattr(flexinspect, name) is getattr(training_debuggers, name)
        assert inspect.getdoc(getattr(training_debuggers, name))


def test_importing_flexinspect_and_the_names_without_torch_loads_no_torch() -> None:
    code = (
        "import sys, flexinspect, flexinspect_hooks.training_debuggers\n"
        "from flexinspect import DebugLevel, DebugSwitches, TrainingPhase\n"
        "print({'torch', 'transformers', 'textual', 'numpy'} & {*sys.modules})\n"
        "flexinspect.PyTorchDebugger\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\nTrue False\n"
