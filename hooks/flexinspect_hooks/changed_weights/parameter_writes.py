"""Tells when a program writes to parameters: in place, through `data`, or by putting in others.

`nn.Parameter` inherits its operations from Tensor. Here some get a wrapper in `nn.Parameter` alone,
so other tensors cost nothing; and a forward pass writes to no parameter.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from flexinspect_hooks.python_internals.own_frames import strip_own_frames
from flexinspect_hooks.python_internals.patching import patch

_WRITES = ("__iadd__", "__isub__", "__setitem__", "add_", "sub_", "copy_", "addmm_")


class ParameterWrites:
    """Calls `on_write` before the parameters of some modules are written to."""

    def __init__(self, on_write: Callable[[], None]) -> None:
        self._on_write = on_write
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        # Ids only: a later module that has one by chance costs a call of `on_write`.
        self._modules = set[int]()
        self._stack: ExitStack | None = None

    def follow(self, model: nn.Module) -> None:
        """Follow the parameters of a model, and those that its modules get later."""
        for one in model.parameters():
            self._parameters[id(one)] = weakref.ref(one)
        self._modules.update(map(id, model.modules()))

    def is_followed(self, tensor: Tensor) -> bool:
        """Whether a tensor is a followed parameter."""
        known = self._parameters.get(id(tensor))
        return known is not None and known() is tensor

    def watch(self) -> None:
        """Call `on_write` from now on."""
        if self._stack is None:
            self._stack = stack = ExitStack()
            for name in _WRITES:
                stack.callback(patch(nn.Parameter, name, self._wrapper(getattr(Tensor, name))))
            stack.callback(patch(nn.Parameter, "data", self._data()))
            handle = register_module_parameter_registration_hook(self._on_register)
            stack.callback(handle.remove)

    def stop(self) -> None:
        """Restore what was wrapped."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def write(parameter: Any, /, *args: Any, **kwargs: Any) -> Any:
            self._tell(parameter)
            try:
                return original(parameter, *args, **kwargs)
            except BaseException as error:
                strip_own_frames(error)
                raise

        return write

    def _data(self) -> property:
        descriptor: Any = Tensor.data

        def get(parameter: Any) -> Any:
            self._tell(parameter)
            return descriptor.__get__(parameter)

        def put(parameter: Any, value: Any) -> None:
            self._tell(parameter)
            try:
                descriptor.__set__(parameter, value)
            except BaseException as error:
                strip_own_frames(error)
                raise

        return property(get, put)

    def _tell(self, parameter: Any) -> None:
        if self.is_followed(parameter) and not torch.compiler.is_compiling():
            with suppress(Exception):  # objects of the program may be of any kind
                self._on_write()

    def _on_register(self, module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and id(module) in self._modules:
            with suppress(Exception):
                self._parameters[id(parameter)] = weakref.ref(parameter)
                self._on_write()
