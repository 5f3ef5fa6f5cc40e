"""Calls of a program's modules that the program does not notice."""

from __future__ import annotations

import dis
import inspect
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, pairwise
from types import CodeType
from typing import Any

import torch
from torch import nn

from flexinspect_hooks.python_internals.torch_private import MODULE_HOOKS


@contextmanager
def quiet_module(module: nn.Module, *, keeps_mode: bool = False) -> Iterator[None]:
    """Let a module be called inside of the block without an effect on the program.

    Hooks of it and of the modules in it that only look do not run; those that `may_change` a value
    do, since they are a part of what the modules compute, as an adapter that a hook adds. All
    modules are in evaluation mode unless `keeps_mode`, no graph is recorded, and afterwards hooks,
    modes and random number generators are as before. So dropout draws nothing from the program's
    generators, and running statistics stay. Hooks that are registered inside of the block run, and
    are dropped at its end.

    The modules themselves change for the time of the block: no other thread may call them.
    """
    tensors = chain(module.parameters(), module.buffers())
    devices = sorted({one.device.index or 0 for one in tensors if one.is_cuda})
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.no_grad())
        for one in module.modules():
            attributes = vars(one)
            for name in MODULE_HOOKS:
                hooks = attributes.get(name)
                if hooks is not None:
                    # Another dictionary: handles refer to the first one, so `remove` works on it.
                    stack.callback(attributes.__setitem__, name, hooks)
                    kept = {key: hook for key, hook in hooks.items() if may_change(hook)}
                    attributes[name] = OrderedDict(kept)
            if one.training and not keeps_mode:
                # Not `eval()`, which a program may override.
                stack.callback(setattr, one, "training", True)
                one.training = False
        yield


def may_change(hook: Any) -> bool:
    """Whether a hook may change what passes through its module: by a result, or in place.

    It is read from the code. A function without a value in its `return` statements returns None. A
    lambda always has a value: one that only calls something, as `lambda *_: calls.append(1)`, is
    taken to return None. In place are assignments to items, `+=` and the like, and methods whose
    names end with an underscore.
    """
    if str(getattr(hook, "__module__", "")).startswith("flexinspect_hooks."):
        return False
    while isinstance(hook, partial):
        hook = hook.func
    hook = inspect.unwrap(hook)
    if not inspect.isroutine(hook):
        hook = type(hook).__call__
    code = getattr(hook, "__code__", None)  # none of a function in C, such as `list.append`
    return code is not None and (_writes_in_place(code) or _has_result(code))


def _writes_in_place(code: CodeType) -> bool:
    return any(name.endswith("_") and name[-2:] != "__" for name in code.co_names) or any(
        one.opname == "STORE_SUBSCR" or (one.opname == "BINARY_OP" and one.argrepr.endswith("="))
        for one in dis.get_instructions(code)
    )


def _has_result(code: CodeType) -> bool:
    for before, one in pairwise(dis.get_instructions(code)):
        if one.opname != "RETURN_VALUE":
            continue
        if one.is_jump_target:  # a conditional expression
            return True
        is_none = before.opname == "LOAD_CONST" and before.argval is None
        is_call = before.opname.startswith("CALL") and code.co_name == "<lambda>"
        if not is_none and not is_call:
            return True
    return False
