"""Finds the frame where a debugger stops, and disables breakpoints in calls made by capture.

To record a mask, capture evaluates its mask_mod again. A breakpoint in the mask_mod is meant for
the user's call: a stop in capture's call would show an evaluation that the model did not make, also
for a compiled call, in which no breakpoint can be hit.
"""

from __future__ import annotations

import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

from flexinspect_hooks.debugger.debugpy_server import active_pydevd, is_attached
from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.python_internals.threads import SharedSwitch

_OWN = ("flexinspect", "flexinspect_hooks")
_STOP_CODE = ("flexinspect_hooks.debugger", "flexinspect_hooks.control")
"""Our packages, and those of them that are on the stack at a stop."""

_MODULE_CALL = ("_call_impl", "module.py")
"""The function and file in torch that run a module's forward: `nn/modules/module.py`."""


def frame_to_stop_in(frame: FrameType) -> FrameType:
    """Return the frame where a debugger stops for something that was detected in `frame`.

    That is the innermost frame of the user's code inside the outermost model's forward (a patched
    forward, a mask_mod, an attention function); otherwise the innermost forward of a module of the
    model, such as a layer; otherwise, between two forwards, the user's innermost frame; and in a
    generation of flexinspect, which has no user code, the frame that calls the model.
    """
    stack = list(_walk_up(frame))
    inside = _model_frames(stack)
    internal = _package_folders("torch", *_STOP_CODE)
    callers = [outer for outer in stack[len(inside) :] if not _is_in(outer, internal)]
    own = next((inner for inner in inside if is_user_frame(inner)), None)
    layer = next((inner for inner in inside if _is_forward(inner)), None)
    anywhere = next((any_ for any_ in stack if is_user_frame(any_)), None)
    return own or layer or anywhere or (callers[0] if callers else frame)


def is_user_frame(frame: FrameType) -> bool:
    """Return whether a frame runs the user's code: no library, not flexinspect, not generated."""
    return is_user_file(frame.f_code.co_filename)


def _walk_up(frame: FrameType | None) -> Iterator[FrameType]:
    # Without the module `traceback`: the program may have a traceback.py, and must get that one.
    while frame is not None:
        yield frame
        frame = frame.f_back


def _model_frames(stack: list[FrameType]) -> list[FrameType]:
    """Return the part of a stack that is inside the outermost module call."""
    codes = (frame.f_code for frame in stack)
    functions = ((code.co_name, os.path.basename(code.co_filename)) for code in codes)  # noqa: PTH119
    calls = [n for n, function in enumerate(functions) if function == _MODULE_CALL]
    return stack[: calls[-1]] if calls else []


def _is_forward(frame: FrameType) -> bool:
    """Return whether a frame is the forward of a module that is not in flexinspect or torch."""
    code = frame.f_code
    is_method = code.co_name == "forward" and "self" in code.co_varnames
    return is_method and not _is_in(frame, _package_folders(*_OWN, "torch"))


def _is_in(frame: FrameType, folders: tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.startswith(folders)


@cache
def is_user_file(filename: str) -> bool:
    """Return whether a file is the user's: of no library, not of flexinspect, not generated."""
    if filename.startswith("<"):
        # A cell of a notebook has such a name; other code of this kind is made by libraries.
        return filename.startswith("<ipython-input")
    path = os.path.abspath(filename)  # noqa: PTH100 (symbolic links are not resolved)
    parts = Path(path).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    return not path.startswith((*_package_folders(*_OWN), *_library_folders()))


@cache
def _library_folders() -> tuple[str, ...]:
    """Return the folders of the standard library, site-packages, and editable installs."""
    paths = sysconfig.get_paths()
    library_paths = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    library_paths |= {*site.getsitepackages(), site.getusersitepackages()}
    real = {os.path.realpath(path) for path in library_paths}
    folders = tuple(os.path.join(path, "") for path in library_paths | real)  # noqa: PTH118
    return (*folders, *_package_folders("torch", "transformers", "accelerate", "debugpy"))


@cache
def _package_folders(*packages: str) -> tuple[str, ...]:
    specs = (importlib.util.find_spec(name) for name in packages)
    locations = (spec.submodule_search_locations for spec in specs if spec is not None)
    return tuple(os.path.join(path, "") for paths in locations for path in paths or ())  # noqa: PTH118


@contextmanager
def breakpoints_disabled() -> Iterator[None]:
    """Context manager in which neither breakpoints nor `breakpoint()` stop this thread."""
    debugger = active_pydevd() if is_attached() else None
    trace = sys.gettrace()
    with _ignored_breakpoint_calls.on():
        if debugger is not None:  # pydevd may not use sys.settrace
            debugger.disable_tracing()
        elif trace is not None:
            sys.settrace(None)
        try:
            yield
        finally:
            if debugger is None:
                if trace is not None:
                    sys.settrace(trace)
            elif trace is not None or sys.version_info >= (3, 12):  # pydevd uses `sys.monitoring`
                debugger.enable_tracing()


_ignored_breakpoint_calls = SharedSwitch(
    lambda: patch(sys, "breakpointhook", lambda *args, **kwargs: None)
)
