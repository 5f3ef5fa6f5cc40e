"""Whose frame is it: the user's own on a stack, told from those of libraries and ours.

To know what a mask opened, capture evaluates its rule once more. A breakpoint in the rule is for
the call that the user made: a stop in ours would show a mask being applied that is only read, and
that of a compiled call, which no breakpoint can be hit in.
"""

from __future__ import annotations

import importlib.util
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from flexinspect_hooks.debugger.debugpy_server import active_pydevd, is_attached

_MODULE_CALL = ("_call_impl", "module.py")
"""What runs a module's forward, in torch's `nn/modules/module.py`."""


def frame_to_stop_in(frame: FrameType) -> FrameType:
    """Return where a debugger should stop for something that was noticed in `frame`.

    That is the innermost frame of the user's own code that runs inside of the outermost model's
    forward (a patched forward, a mask rule, an attention function); else the innermost forward of
    a module that is not ours, the layer's; else, between two forwards, the user's innermost frame;
    and in our own generation, which has none, the one that calls the model.
    """
    stack = list(_walk_up(frame))
    inside = _model_frames(stack)
    between = (*_package_folders("torch"), *_stop_code_folders())
    callers = [one for one in stack[len(inside) :] if not _is_in(one, between)]
    own = next((one for one in inside if is_user_frame(one)), None)
    layer = next((one for one in inside if _is_forward(one)), None)
    anywhere = next((one for one in stack if is_user_frame(one)), None)
    return own or layer or anywhere or (callers[0] if callers else frame)


def is_user_frame(frame: FrameType) -> bool:
    """Say whether a frame runs code of the user's: no library, nothing of ours, nothing made."""
    return _is_user_file(frame.f_code.co_filename)


def _walk_up(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _model_frames(stack: list[FrameType]) -> list[FrameType]:
    """Return the part of a stack that lies in the outermost module call."""
    calls = [n for n, frame in enumerate(stack) if _is_module_call(frame)]
    return stack[: calls[-1]] if calls else []


def _is_module_call(frame: FrameType) -> bool:
    code = frame.f_code
    return (code.co_name, os.path.basename(code.co_filename)) == _MODULE_CALL  # noqa: PTH119


def _is_forward(frame: FrameType) -> bool:
    """Say whether a frame is a module's own forward: none of ours, none of torch.nn."""
    code = frame.f_code
    is_method = code.co_name == "forward" and "self" in code.co_varnames
    return is_method and not _is_in(frame, (*_own_folders(), *_package_folders("torch")))


def _is_in(frame: FrameType, folders: tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.startswith(folders)


@cache
def _is_user_file(filename: str) -> bool:
    if filename.startswith("<"):
        # A cell of a notebook has a file of its own; what is left was made by a library.
        return filename.startswith("<ipython-input")
    path = os.path.abspath(filename)  # noqa: PTH100 (a symbolic link keeps its name)
    parts = Path(path).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    return not path.startswith((*_own_folders(), *_library_folders()))


@cache
def _own_folders() -> tuple[str, ...]:
    return _package_folders("flexinspect", "flexinspect_hooks")


@cache
def _stop_code_folders() -> tuple[str, ...]:
    return _package_folders("flexinspect_hooks.debugger", "flexinspect_hooks.control")


@cache
def _library_folders() -> tuple[str, ...]:
    """Return the folders of the standard library, and of what may be installed for development."""
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages()}
    real = {os.path.realpath(one) for one in found}
    folders = tuple(os.path.join(one, "") for one in found | real)  # noqa: PTH118
    return (*folders, *_package_folders("torch", "transformers", "accelerate", "debugpy"))


@cache
def _package_folders(*packages: str) -> tuple[str, ...]:
    specs = (importlib.util.find_spec(name) for name in packages)
    places = (spec.submodule_search_locations for spec in specs if spec is not None)
    return tuple(os.path.join(one, "") for found in places for one in found or ())  # noqa: PTH118


_USES_MONITORING = sys.version_info >= (3, 12)
"""Whether pydevd watches a thread without tracing it."""

_active_lock = threading.Lock()
_active: list[Any] = [0, None]
"""How many threads are within, and the hook of `breakpoint()` that was there before the first."""


@contextmanager
def breakpoints_disabled() -> Iterator[None]:
    """While entered, neither breakpoints nor `breakpoint()` stop this thread."""
    found = active_pydevd() if is_attached() else None
    trace = sys.gettrace()
    _disable_breakpointhook()
    if found is not None:  # pydevd has ways of its own
        found.disable_tracing()
    elif trace is not None:
        sys.settrace(None)
    try:
        yield
    finally:
        if found is None:
            if trace is not None:
                sys.settrace(trace)
        elif trace is not None or _USES_MONITORING:
            found.enable_tracing()
        _restore_breakpointhook()


def _disable_breakpointhook() -> None:
    with _active_lock:
        if not _active[0]:
            _active[1], sys.breakpointhook = sys.breakpointhook, _ignore_breakpoint
        _active[0] += 1


def _restore_breakpointhook() -> None:
    with _active_lock:
        _active[0] -= 1
        if not _active[0]:
            sys.breakpointhook = _active[1]


def _ignore_breakpoint(*args: Any, **kwargs: Any) -> None:
    """Do nothing at a `breakpoint()`."""
