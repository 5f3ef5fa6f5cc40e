"""The attention kernels themselves, watched in the whole process, however they were imported.

`flex_attention` and `create_block_mask` are Python functions: while somebody observes, their code
is exchanged for a detour, so that every name, closure and compiled wrapper that holds the function
takes it. `scaled_dot_product_attention` is built in, so every module that holds it gets a wrapper
under its name. Afterwards everything is as it was.

A call made inside a compiled graph runs no Python and is not seen. `torch.compile(flex_attention)`
is: dynamo passes over the detour and compiles, or finds compiled, the function's own code.
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
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code

from flexinspect_hooks.capture.hook import Remove
from flexinspect_hooks.debugger.python_mods import with_python_mods

FLEX, BUILD, SDPA = "flex_attention", "create_block_mask", "scaled_dot_product_attention"


class KernelCall(NamedTuple):
    """A call of a kernel: which, its arguments by name, whether compiled code is to run it.

    Past dynamo's recompile limit a compiled wrapper runs plain Python, as `ran_uncompiled` tells.
    """

    name: str
    arguments: dict[str, Any]
    compiled: bool


def repeat_call(call: KernelCall, value: Tensor) -> Any:
    """Make a call of an attention kernel again, with other values."""
    given = {**call.arguments, "value": value}
    if call.name == SDPA:
        return functional.scaled_dot_product_attention(**given)
    kernel = flex_module.flex_attention
    return torch.compile(kernel)(**given) if call.compiled else kernel(**given)


class KernelObserver(Protocol):
    """Who is told of kernel calls. What an observer raises is lost; the call goes on."""

    def accepts(self, name: str) -> bool:
        """Say whether to describe a call of this kernel; asked first, as describing it costs."""
        ...

    def before(self, call: KernelCall) -> Any:
        """A call begins; None when it is none of the observer's, else what names it later."""
        ...

    def after(self, note: Any, output: Any) -> None:
        """It returned."""
        ...

    def failed(self, note: Any, error: BaseException) -> None:
        """It raised, and the exception goes on to the caller."""
        ...


_observers: list[KernelObserver] = []
"""The newest is asked first, and the first that wants a call has it alone."""
_restores: list[Remove] = []


def observe_kernels(observer: KernelObserver) -> Remove:
    """Tell `observer` of every call from now on; returns what ends that."""
    if not _observers:
        _install()
    _observers.append(observer)

    def remove() -> None:
        if observer in _observers:
            _observers.remove(observer)
            if not _observers:
                _uninstall()

    return remove


def _install() -> None:
    for name in (FLEX, BUILD):
        _restores.append(_detour(getattr(flex_module, name)))
    _restores.append(_rebind(functional.scaled_dot_product_attention))
    if hasattr(flex_module, _UNCOMPILED_ONLY):
        _restores.append(_track_uncompiled(getattr(flex_module, _UNCOMPILED_ONLY)))


def _uninstall() -> None:
    while _restores:
        _restores.pop()()


_UNCOMPILED_ONLY = "setup_compilation_env"
"""What `flex_attention` calls where it runs as Python, and nowhere else."""

_local = threading.local()


def ran_uncompiled() -> bool:
    """Say whether the last call of FlexAttention in this thread ran as plain Python."""
    return getattr(_local, "ran_plain", False)


def _track_uncompiled(function: Callable[..., Any]) -> Remove:
    def noted(*args: Any, **kwargs: Any) -> Any:
        _local.ran_plain = True
        return function(*args, **kwargs)

    skip_code(cast(FunctionType, noted).__code__)
    setattr(flex_module, _UNCOMPILED_ONLY, noted)
    return lambda: setattr(flex_module, _UNCOMPILED_ONLY, function)


# -- a call ------------------------------------------------------------------------------------


def _observed_call(
    name: str, own: Callable[..., Any], names: tuple[str, ...], args: Any, kw: Any
) -> Any:
    """Make the call and tell who wants to know; nothing of ours is left for dynamo to compile."""
    compiled = callable(get_eval_frame_callback())
    if name == FLEX and not compiled:
        own = with_python_mods(own, args[3] if len(args) > 3 else kw.get("score_mod"))
    tell = _apply_uncompiled if compiled else _apply
    if not tell(_has_observer, name):
        return own(*args, **kw)
    call = KernelCall(name, {**dict(zip(names, args, strict=False)), **kw}, compiled)
    told = tell(_begin, call)
    if told is None:
        return own(*args, **kw)
    observer, note = told
    _local.ran_plain = False
    try:
        output = own(*args, **kw)
    except BaseException as error:
        tell(_end, observer.failed, note, error)
        raise
    tell(_end, observer.after, note, output)
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


def _end(callback: Callable[[Any, Any], None], note: Any, what: Any) -> None:
    with suppress(Exception):
        callback(note, what)


def _apply(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


_apply_uncompiled: Callable[..., Any] = torch._dynamo.disable(_apply)  # type: ignore[no-untyped-call]
"""Calls a function of ours where dynamo would compile it otherwise."""

skip_code(_observed_call.__code__)


# -- Python functions --------------------------------------------------------------------------


def _detour(function: FunctionType) -> Remove:
    """Exchange a function's code for one that calls `_seen`; the signature stays the same.

    Dynamo remembers how arguments are bound per function, not per code, so a detour that took
    (*args, **kwargs) would break what it compiles afterwards.
    """
    code, hidden = function.__code__, f"_flexinspect_{function.__name__}"
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__
    name, names = function.__name__, tuple(inspect.signature(function).parameters)

    def see(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)
        return _observed_call(name, own, names, args, kwargs)

    skip_code(see.__code__)
    function.__globals__[hidden] = see
    function.__code__ = _detour_code(function, hidden)

    def restore() -> None:
        function.__code__ = code
        function.__globals__.pop(hidden, None)

    return restore


def _detour_code(function: FunctionType, hidden: str) -> CodeType:
    """Return code with the function's own parameters, which hands their values to `hidden`."""
    signature = inspect.signature(function)
    found = signature.parameters.values()
    bare = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None)
        for p in found
    ]
    head = signature.replace(parameters=bare, return_annotation=signature.empty)
    args = "".join(f"{p.name}, " for p in found if p.kind is not p.KEYWORD_ONLY)
    kwargs = ", ".join(f"{p.name!r}: {p.name}" for p in found if p.kind is p.KEYWORD_ONLY)
    made: dict[str, Any] = {}
    exec(f"def {function.__name__}{head}:\n    return {hidden}(({args}), {{{kwargs}}})", made)
    own = function.__code__
    # The file decides what dynamo does with a function, and this one stands in for another's.
    code: CodeType = made[function.__name__].__code__.replace(
        co_filename=own.co_filename, co_firstlineno=own.co_firstlineno
    )
    skip_code(code)
    return code


# -- the built-in function ---------------------------------------------------------------------

_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _rebind(function: Callable[..., Any]) -> Remove:
    """Put a wrapper wherever a module holds the function under a name."""

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return _observed_call(SDPA, function, _SDPA_NAMES, args, kwargs)

    skip_code(scaled_dot_product_attention.__code__)
    functools.update_wrapper(scaled_dot_product_attention, function)
    places = list(_references(function))
    for module, name in places:
        setattr(module, name, scaled_dot_product_attention)

    def restore() -> None:
        # Modules imported meanwhile may have taken the wrapper.
        for module, name in _references(scaled_dot_product_attention):
            setattr(module, name, function)

    return restore


def _references(thing: object) -> Iterator[tuple[ModuleType, str]]:
    """Yield where the modules of the process hold an object: the module and the name."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__ != "torch._C._nn":
            held = [name for name, value in list(vars(module).items()) if value is thing]
            yield from ((module, name) for name in held)
