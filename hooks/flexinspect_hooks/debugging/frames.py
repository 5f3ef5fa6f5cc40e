"""Whose frame is it: the user's own on a stack, told from those of libraries and ours."""

from __future__ import annotations

import importlib.util
import os
import site
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

_ROOT = ("_call_impl", "module.py")
"""What runs a module's forward, in torch's `nn/modules/module.py`."""


def best_frame(frame: FrameType) -> FrameType:
    """Return where a debugger should stop for something that was noticed in `frame`.

    That is the innermost frame of the user's own code that runs inside of the outermost model's
    forward (a patched forward, a mask rule, an attention function); else the innermost forward of
    a module that is not ours, the layer's; else, between two forwards, the user's innermost frame.
    """
    stack = list(_up(frame))
    inside = _in_the_model(stack)
    own = next((one for one in inside if is_users(one)), None)
    layer = next((one for one in inside if _is_forward(one)), None)
    anywhere = next((one for one in stack if is_users(one)), None)
    return own or layer or anywhere or frame


def is_users(frame: FrameType) -> bool:
    """Say whether a frame runs code of the user's: no library, nothing of ours, nothing made."""
    return _is_users_file(frame.f_code.co_filename)


def _up(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _in_the_model(stack: list[FrameType]) -> list[FrameType]:
    """Return the part of a stack that lies in the outermost module call."""
    calls = [n for n, frame in enumerate(stack) if _is_module_call(frame)]
    return stack[: calls[-1]] if calls else []


def _is_module_call(frame: FrameType) -> bool:
    code = frame.f_code
    return (code.co_name, os.path.basename(code.co_filename)) == _ROOT  # noqa: PTH119


def _is_forward(frame: FrameType) -> bool:
    """Say whether a frame is a module's own forward: none of ours, none of torch.nn."""
    code = frame.f_code
    is_method = code.co_name == "forward" and "self" in code.co_varnames
    return is_method and not code.co_filename.startswith((*_ours(), *_folders_of("torch")))


@cache
def _is_users_file(filename: str) -> bool:
    if filename.startswith("<"):
        # A cell of a notebook has a file of its own; what is left was made by a library.
        return filename.startswith("<ipython-input")
    path = os.path.abspath(filename)  # noqa: PTH100 (a symbolic link keeps its name)
    parts = Path(path).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    return not path.startswith((*_ours(), *_libraries()))


@cache
def _ours() -> tuple[str, ...]:
    return _folders_of("flexinspect", "flexinspect_hooks")


@cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of the standard library, and of what may be installed for development."""
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages()}
    real = {os.path.realpath(one) for one in found}
    folders = tuple(os.path.join(one, "") for one in found | real)  # noqa: PTH118
    return (*folders, *_folders_of("torch", "transformers", "accelerate", "debugpy"))


@cache
def _folders_of(*packages: str) -> tuple[str, ...]:
    specs = (importlib.util.find_spec(name) for name in packages)
    places = (spec.submodule_search_locations for spec in specs if spec is not None)
    return tuple(os.path.join(one, "") for found in places for one in found or ())  # noqa: PTH118
