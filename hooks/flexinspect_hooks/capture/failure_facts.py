"""Reads where and on what an exception was raised, while its frames still hold their variables.

The facts are plain data for the event of the exception; `flexinspect.rules.run_failures` makes the
finding. This module does not import torch: without torch in the process there is no model to name.
"""

from __future__ import annotations

import linecache
import re
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

from flexinspect.core.errors import FlexInspectError, exception_chain, summarize_error

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_MASK_NAMES = ("attention_mask", "attn_mask", "block_mask", "mask")
_OWN_FOLDERS = ("flexinspect", "flexinspect_hooks")
_MAX_VALUES, _MAX_TEXT, _MAX_CAPTURED = 12, 300, 8


def failure_facts(error: BaseException) -> dict[str, Any]:
    """Return what is known of an exception, as data of its event; nothing here raises.

    `frame` is the deepest frame outside of Python's and installed packages: file, line, function
    and source text. `module`, `class` and `layer` are those of the innermost module that ran,
    `mask` describes the mask that it received, and `rule` the mask_mod or score_mod that raised,
    with the values that it captured and what it gives for four or five 0-dim tensors.
    """
    raised = [summarize_error(link) for link in exception_chain(error)]
    facts: dict[str, Any] = {"error": raised[0][:_MAX_TEXT], "chain": raised}
    if isinstance(error, FlexInspectError):
        facts["is_own"] = True
    with suppress(Exception):
        frames = list(_frames(error))
        facts["is_deliberate"] = is_deliberate(error)
        for name, found in (
            ("frame", _user_frame(frames)),
            ("mask", _received_mask(frames)),
            ("rule", _failed_rule(frames)),
        ):
            if found is not None:
                facts[name] = found
        facts |= _module(frames)
    return facts


def rule_facts(error: BaseException) -> dict[str, Any] | None:
    """Return the mask_mod or score_mod that raised an exception, None if another function did."""
    with suppress(Exception):
        return _failed_rule(list(_frames(error)))
    return None


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield frames and their lines, the outermost first; for our own errors those of the cause."""
    links = exception_chain(error)
    own = isinstance(error, FlexInspectError) and len(links) > 1
    trace = (links[1] if own else error).__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _library_folders() -> tuple[str, ...]:
    paths = {*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    paths |= {str(Path(module.__file__).parent) for module in _own_modules() if module.__file__}
    return tuple(f"{path}/" for path in paths if path)


def is_library_file(file: str) -> bool:
    """Whether a file is of Python, of an installed package, or of no file at all."""
    return file.startswith(("<", *_library_folders()))


def _own_modules() -> Sequence[Any]:
    return [sys.modules[name] for name in _OWN_FOLDERS if name in sys.modules]


def is_deliberate(error: BaseException) -> bool:
    """Whether the program raised an exception itself: one of its own class, or by `raise`."""
    with suppress(Exception):
        if _is_user_class(type(error)):
            return True
        frame, line = list(_frames(error))[-1]
        file = frame.f_code.co_filename
        text = linecache.getline(file, line, frame.f_globals).strip()
        return not file.startswith(("<", *_library_folders())) and text.startswith("raise")
    return False


def _is_user_class(cls: type) -> bool:
    """Whether a class is of the program itself, and not of Python or an installed package."""
    if cls.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is not None and not file.startswith(_library_folders())


def _user_frame(frames: Sequence[tuple[FrameType, int]]) -> dict[str, Any] | None:
    """Return the deepest frame that is not of a library: below the handler, else above it."""
    folders = _library_folders()
    for frame, line in chain(reversed(frames), _callers(frames[0][0] if frames else None)):
        file = frame.f_code.co_filename
        if file.startswith(("<", *folders)):
            continue
        text = linecache.getline(file, line, frame.f_globals).strip()
        facts = {"file": file, "line": line, "function": frame.f_code.co_qualname}
        return facts | {"code": text[:_MAX_TEXT]}
    return None


def _callers(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None and (frame := frame.f_back) is not None:
        yield frame, frame.f_lineno


# -- the module ------------------------------------------------------------------------------------


def _module(frames: Sequence[tuple[FrameType, int]]) -> dict[str, Any]:
    """Return name, class and layer of the innermost module on the stack, empty without one."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    modules = [
        module
        for frame, _ in frames
        if frame.f_code.co_argcount
        and isinstance(module := _first_argument(frame), torch.nn.Module)
    ]
    if not modules:
        return {}
    root, inner = modules[0], modules[-1]
    name = next((str(name) for name, one in root.named_modules() if one is inner), "")
    facts: dict[str, Any] = {"module": name, "class": type(inner).__name__}
    layer = getattr(inner, "layer_idx", None)
    found = _LAYER.search(name)
    if isinstance(layer, int) or found is not None:
        facts["layer"] = layer if isinstance(layer, int) else int(found[1]) if found else None
    implementation = getattr(getattr(root, "config", None), "_attn_implementation", None)
    if isinstance(implementation, str):
        facts["implementation"] = implementation
    return facts


def _first_argument(frame: FrameType) -> Any:
    return frame.f_locals.get(frame.f_code.co_varnames[0])


# -- the mask --------------------------------------------------------------------------------------


def _received_mask(frames: Sequence[tuple[FrameType, int]]) -> str | None:
    """Describe the mask of the innermost frame that has one."""
    for frame, _ in reversed(frames):
        variables = frame.f_locals
        named = [variables.get(name) for name in _MASK_NAMES]
        tables = (variables.get(name) for name in ("model_kwargs", "kwargs"))
        named += [one.get("attention_mask") for one in tables if isinstance(one, Mapping)]
        for value in (variables.get("self"), *named):
            if (described := describe_mask(value)) is not None:
                return described
    return None


def describe_mask(value: Any) -> str | None:
    """Return "BlockMask of 1 x 1 x 12 x 12" or "bool tensor (1, 12)", None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None and isinstance(value, flex.BlockMask):
        return f"BlockMask of {' x '.join(map(str, value.shape))}"
    if isinstance(value, torch.Tensor) and value.dim() >= 2:
        return f"{_dtype(value)} tensor {tuple(value.shape)}"
    return None


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# -- the rule --------------------------------------------------------------------------------------


def _failed_rule(frames: Sequence[tuple[FrameType, int]]) -> dict[str, Any] | None:
    """Return the innermost function on the stack that was called with four or five 0-dim tensors.

    That is how FlexAttention calls a mask_mod and a score_mod, below `torch.vmap`.
    """
    torch = sys.modules.get("torch")
    folders = _library_folders()
    for frame, line in reversed(frames) if torch is not None else ():
        code = frame.f_code
        indices = [frame.f_locals.get(name) for name in _parameters(code)]
        if code.co_filename.startswith(folders) or len(indices) not in (4, 5):
            continue
        if not all(_is_scalar(value) for value in indices):
            continue
        rule: dict[str, Any] = {
            "name": code.co_qualname.rpartition("<locals>.")[2],
            "kind": "mask_mod" if len(indices) == 4 else "score_mod",
            "file": code.co_filename,
            "line": line,
            "captured": [_describe_captured(*pair) for pair in _captured(frame)][:_MAX_CAPTURED],
        }
        last = _last_indices(frames)
        with suppress(Exception):
            rule["probes"] = list(_probes(_as_function(frame), len(indices), last))
        return rule
    return None


def _parameters(code: CodeType) -> tuple[str, ...]:
    names = code.co_varnames[: code.co_argcount]
    return names[1:] if names[:1] == ("self",) else names


def _is_scalar(value: Any) -> bool:
    torch: Any = sys.modules["torch"]
    with suppress(Exception):
        return isinstance(value, torch.Tensor) and value.dim() == 0
    return False


def _captured(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a function that come from outside, without functions and modules."""
    code, variables = frame.f_code, frame.f_locals
    outside = {name: variables[name] for name in code.co_freevars if name in variables}
    outside |= {name: frame.f_globals[name] for name in code.co_names if name in frame.f_globals}
    torch: Any = sys.modules["torch"]
    for name, value in outside.items():
        if isinstance(value, torch.Tensor | int | float | list | tuple):
            yield name, value


def _describe_captured(name: str, value: Any) -> str:
    """Return "segments: int64 tensor (1, 12), values [[0, 0, 1]]" or "n: 3"."""
    torch: Any = sys.modules["torch"]
    if not isinstance(value, torch.Tensor):
        return f"{name}: {type(value).__name__} {str(value)[:40]}"
    described = f"{name}: {_dtype(value)} tensor {tuple(value.shape)}"
    with suppress(Exception):
        if value.device.type != "cpu" or not value.numel():
            return described
        if value.numel() <= _MAX_VALUES:
            return f"{described}, values {value.tolist()}"
        lowest, highest = value.min().item(), value.max().item()
        return f"{described}, values from {lowest:g} to {highest:g}"
    return described


def _last_indices(frames: Sequence[tuple[FrameType, int]]) -> tuple[int, int]:
    """Return the last row and key of the mask that was built, or of the call; zeros if unknown."""
    for frame, _ in reversed(frames):
        variables = frame.f_locals
        sizes = (variables.get("Q_LEN"), variables.get("KV_LEN"))
        query: Any = variables.get("query")
        key: Any = variables.get("key")
        if hasattr(query, "shape") and hasattr(key, "shape") and len(query.shape) == 4:
            sizes = (int(query.shape[-2]), int(key.shape[-2]))
        if all(isinstance(size, int) and size > 0 for size in sizes):
            return int(sizes[0] or 1) - 1, int(sizes[1] or 1) - 1
    return 0, 0


def _as_function(frame: FrameType) -> FunctionType:
    code, variables = frame.f_code, frame.f_locals
    cells = tuple(CellType(variables[name]) for name in code.co_freevars)
    return FunctionType(code, frame.f_globals, code.co_name, None, cells)


def _probes(rule: FunctionType, n: int, last: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Call a rule for its first and its last cell, and yield what it gives or raises."""
    torch: Any = sys.modules["torch"]
    for cell in dict.fromkeys(((0, 0), last)):
        indices = [torch.tensor(value, device="cpu") for value in (0, 0, *cell)]
        if n == 5:
            indices.insert(0, torch.tensor(0.0, device="cpu"))
        try:
            given = rule(*indices)
            is_tensor = isinstance(given, torch.Tensor)
            text = f"{_dtype(given)} {tuple(given.shape)}" if is_tensor else type(given).__name__
            yield {"cell": list(cell), "gives": text}
        except Exception as error:
            yield {"cell": list(cell), "raises": summarize_error(error)[:_MAX_TEXT]}
