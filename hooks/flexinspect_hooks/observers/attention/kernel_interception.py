"""Intercepts the attention kernels in the whole process, however they were imported.

`flex_attention` and `create_block_mask` are Python functions: while there are observers, their code
is replaced by a detour, so that every name, closure and compiled wrapper that refers to the
function takes it. `scaled_dot_product_attention` is a built-in, so every module that refers to it
gets a wrapper under that name. Without observers everything is restored.

A call inside a compiled graph runs no Python and is not observed. A call of
`torch.compile(flex_attention)` is: dynamo skips the detour and compiles the function's own code, or
finds it compiled.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.attention.flex_attention as flex_module
import torch.nn.functional as functional
from torch import Tensor

from flexinspect_hooks.capture.hook import Remove
from flexinspect_hooks.debugger.python_mods import with_python_mods
from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.python_internals.torch_private import eval_frame_callback_getter, skip_code

FLEX, BUILD, SDPA = "flex_attention", "create_block_mask", "scaled_dot_product_attention"


class KernelCall(NamedTuple):
    """A call of a kernel: its name, its arguments by name, whether a compiled wrapper called it.

    Past dynamo's recompile limit a compiled wrapper runs plain Python; see `ran_uncompiled`.
    """

    name: str
    arguments: dict[str, Any]
    compiled: bool


def repeat_call(call: KernelCall, value: Tensor) -> Any:
    """Repeat a call of an attention kernel with another `value`, (B, kv heads, keys, D)."""
    arguments = {**call.arguments, "value": value}
    if call.name == SDPA:
        return functional.scaled_dot_product_attention(**arguments)
    kernel = flex_module.flex_attention
    return torch.compile(kernel)(**arguments) if call.compiled else kernel(**arguments)


class KernelObserver(Protocol):
    """Receives kernel calls. Exceptions of an observer are ignored; the call continues."""

    def accepts(self, name: str) -> bool:
        """Whether the observer may want a call of this kernel. Called before the call is described,
        because describing it costs time.
        """
        ...

    def before(self, call: KernelCall) -> Any:
        """Called before the kernel. Returns an object for `after` or `failed`, None to decline."""
        ...

    def after(self, note: Any, output: Any) -> None:
        """Called when the kernel returned; `note` is what `before` returned."""
        ...

    def failed(self, note: Any, error: BaseException) -> None:
        """Called when the kernel raised; the exception then propagates to the caller."""
        ...


_observers: list[KernelObserver] = []
"""The newest comes first, and only the first that takes a call receives it."""
_restores: list[Remove] = []


def observe_kernels(observer: KernelObserver) -> Remove:
    """Pass every kernel call to `observer` from now on; returns a function that stops it."""
    if not _observers:
        _install()
    _observers.append(observer)

    def remove() -> None:
        if observer in _observers:
            _observers.remove(observer)
            if not _observers:
                while _restores:
                    _restores.pop()()

    return remove


def _install() -> None:
    for name in (FLEX, BUILD):
        _restores.append(_detour(getattr(flex_module, name)))
    _restores.append(_rebind(functional.scaled_dot_product_attention))
    if hasattr(flex_module, _UNCOMPILED_ONLY):
        _restores.append(_track_uncompiled(getattr(flex_module, _UNCOMPILED_ONLY)))


_UNCOMPILED_ONLY = "setup_compilation_env"
"""A function that `flex_attention` calls only when it runs as plain Python."""

_local = threading.local()


def ran_uncompiled() -> bool:
    """Whether the last call of FlexAttention in this thread ran as plain Python."""
    return getattr(_local, "ran_plain", False)


def _track_uncompiled(function: Callable[..., Any]) -> Remove:
    def noted(*args: Any, **kwargs: Any) -> Any:
        _local.ran_plain = True
        return function(*args, **kwargs)

    skip_code(cast(FunctionType, noted).__code__)
    return patch(flex_module, _UNCOMPILED_ONLY, noted)


# -- a call ------------------------------------------------------------------------------------


def _observed_call(
    name: str, own: Callable[..., Any], names: tuple[str, ...], args: Any, kw: Any
) -> Any:
    """Make the call and pass it to an observer; dynamo compiles nothing but the kernel's own code.

    `own` is the kernel and `names` are those of its parameters.
    """
    compiled = callable(_eval_frame_callback())
    if name == FLEX and not compiled:
        own = with_python_mods(own, args[3] if len(args) > 3 else kw.get("score_mod"))
    apply = _apply_uncompiled if compiled else _apply
    if not apply(_has_observer, name):
        return own(*args, **kw)
    call = KernelCall(name, {**dict(zip(names, args, strict=False)), **kw}, compiled)
    accepted = apply(_begin, call)
    if accepted is None:
        return own(*args, **kw)
    observer, note = accepted
    _local.ran_plain = False
    try:
        output = own(*args, **kw)
    except BaseException as error:
        apply(_end, observer.failed, note, error)
        raise
    apply(_end, observer.after, note, output)
    return output


def _has_observer(name: str) -> bool:
    for observer in _observers:
        with suppress(Exception):
            if observer.accepts(name):
                return True
    return False


def _begin(call: KernelCall) -> tuple[KernelObserver, Any] | None:
    for observer in reversed(_observers):
        with suppress(Exception):
            note = observer.before(call) if observer.accepts(call.name) else None
            if note is not None:
                return observer, note
    return None


def _end(callback: Callable[[Any, Any], None], note: Any, result: Any) -> None:
    with suppress(Exception):
        callback(note, result)


def _apply(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


_apply_uncompiled: Callable[..., Any] = torch.compiler.disable(_apply)  # type: ignore[no-untyped-call]
"""Calls a function that dynamo would compile otherwise."""

_eval_frame_callback = eval_frame_callback_getter()

skip_code(_observed_call.__code__)


# -- Python functions --------------------------------------------------------------------------


def _detour(function: FunctionType) -> Remove:
    """Replace a function's code by one that calls `_observed_call`, with the same signature.

    Dynamo caches how arguments are bound per function, not per code, so a detour that took
    (*args, **kwargs) would break later compilations.
    """
    code, hidden = function.__code__, f"_flexinspect_{function.__name__}"
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__
    name, names = function.__name__, tuple(inspect.signature(function).parameters)

    def observe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)
        return _observed_call(name, own, names, args, kwargs)

    skip_code(observe.__code__)
    function.__globals__[hidden] = observe
    function.__code__ = _detour_code(function, hidden)

    def restore() -> None:
        function.__code__ = code
        function.__globals__.pop(hidden, None)

    return restore


def _detour_code(function: FunctionType, hidden: str) -> CodeType:
    """Return code with the function's own parameters that passes their values to `hidden`."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    bare = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None)
        for p in parameters
    ]
    head = signature.replace(parameters=bare, return_annotation=signature.empty)
    args = "".join(f"{p.name}, " for p in parameters if p.kind is not p.KEYWORD_ONLY)
    kwargs = ", ".join(f"{p.name!r}: {p.name}" for p in parameters if p.kind is p.KEYWORD_ONLY)
    namespace: dict[str, Any] = {}
    exec(f"def {function.__name__}{head}:\n    return {hidden}(({args}), {{{kwargs}}})", namespace)
    own = function.__code__
    # Dynamo decides by the file name how to treat a function, so the detour keeps the original's.
    code: CodeType = namespace[function.__name__].__code__.replace(
        co_filename=own.co_filename, co_firstlineno=own.co_firstlineno
    )
    skip_code(code)
    return code


# -- the built-in function ---------------------------------------------------------------------

_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _rebind(function: Callable[..., Any]) -> Remove:
    """Replace the function by a wrapper in every module that refers to it."""

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return _observed_call(SDPA, function, _SDPA_NAMES, args, kwargs)

    skip_code(scaled_dot_product_attention.__code__)
    functools.update_wrapper(scaled_dot_product_attention, function)
    for module, name in list(_references(function)):
        setattr(module, name, scaled_dot_product_attention)

    def restore() -> None:
        # Searched again, because modules imported meanwhile may refer to the wrapper.
        for module, name in _references(scaled_dot_product_attention):
            setattr(module, name, function)

    return restore


def _references(target: object) -> Iterator[tuple[ModuleType, str]]:
    """Yield (module, name) for each global variable of a module that refers to an object."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__ != "torch._C._nn":
            names = [name for name, value in list(vars(module).items()) if value is target]
            yield from ((module, name) for name in names)
