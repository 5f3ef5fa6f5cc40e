"""A plug-in of pydevd that shows the descriptions of `value_descriptions` in a debugger client.

pydevd searches for plug-ins when it is loaded, which may be before flexinspect, so `register` adds
this module.
"""

from __future__ import annotations

import sys
from typing import Any

from _pydevd_bundle import pydevd_extension_utils, pydevd_xml
from _pydevd_bundle.pydevd_extension_api import StrPresentationProvider, TypeResolveProvider
from _pydevd_bundle.pydevd_resolver import defaultResolver

__all__ = ["ContainerText", "TensorChildren", "TorchText"]

MAX_SLICES = 20
"""Most slices of a tensor, or layers of a cache, that are listed."""

Child = tuple[str, Any, str | None]
"""A child's name, its value, and the expression suffix that evaluates it."""


def register() -> None:
    """Register this module with pydevd, also for types that pydevd has shown before."""
    manager, module = pydevd_extension_utils.EXTENSION_MANAGER_INSTANCE, sys.modules[__name__]
    manager._ensure_loaded()
    if module not in manager.loaded_extensions:
        manager.loaded_extensions.append(module)
        manager.type_to_instance.clear()
        # Its constructor clears the providers that were cached per type.
        pydevd_xml._TYPE_RESOLVE_HANDLER.__init__()


def _kind(type_object: type) -> str | None:
    """Return which kind of value a type is, without importing the modules of these types."""
    for kind, (module, name) in _KINDS.items():
        base = getattr(sys.modules.get(module), name, None)
        if isinstance(base, type) and issubclass(type_object, base):
            return kind
    return None


_KINDS = {
    "tensor": ("torch", "Tensor"),
    "mask": ("torch.nn.attention.flex_attention", "BlockMask"),
    "cache": ("transformers.cache_utils", "Cache"),
    "module": ("torch.nn", "Module"),
}


class TorchText(StrPresentationProvider):  # type: ignore[misc]
    """The text of a tensor, a block mask, a cache or a module, in one line."""

    def can_provide(self, type_object: type, type_name: str) -> bool:
        """Return whether the type is one of these."""
        return _kind(type_object) is not None

    def get_str(self, val: Any) -> str:
        """Return the text."""
        from flexinspect_hooks.debugger import value_descriptions

        text: str = getattr(value_descriptions, f"describe_{_kind(type(val)) or 'tensor'}")(val)
        return text

    def get_str_in_context(self, val: Any, context: str) -> str:
        """Return the text, or torch's own `repr` for an expression that the user typed."""
        from flexinspect_hooks.debugger import value_descriptions

        kind = _kind(type(val))
        if context not in ("repl", "clipboard") or kind not in ("tensor", "module"):
            return self.get_str(val)
        with value_descriptions.torch_modes_disabled():
            return repr(value_descriptions.unwrap_tensor(val) if kind == "tensor" else val)


class ContainerText(StrPresentationProvider):  # type: ignore[misc]
    """The text of a list, tuple or dict of such values; pydevd itself would format each value."""

    def can_provide(self, type_object: type, type_name: str) -> bool:
        """Return whether the type is a plain container, in a process with torch."""
        return type_object in (list, tuple, dict) and "torch.nn.attention" in sys.modules

    def get_str(self, val: Any) -> str | None:
        """Return the text, or None to leave the value to pydevd."""
        from flexinspect_hooks.debugger.value_descriptions import describe_container

        return describe_container(val)


class TensorChildren(TypeResolveProvider):  # type: ignore[misc]
    """The children of a tensor (attributes, slices), a mask (pictures) or a cache (layers)."""

    def can_provide(self, type_object: type, type_name: str) -> bool:
        """Return whether the type is a tensor, mask or cache; modules keep pydevd's children."""
        return _kind(type_object) in ("tensor", "mask", "cache")

    def resolve(self, var: Any, attribute: str) -> Any:
        """Return a child by name."""
        return self.get_dictionary(var).get(attribute)

    def get_dictionary(self, var: Any) -> dict[str, Any]:
        """Return the children by name."""
        return {name: value for name, value, _ in self.get_contents_debug_adapter_protocol(var)}

    def get_contents_debug_adapter_protocol(self, var: Any, fmt: Any = None) -> list[Child]:
        """Return the children, in order."""
        children_of = {"tensor": _tensor_children, "mask": _mask_children, "cache": _cache_children}
        return children_of[_kind(type(var)) or "tensor"](var)


def _tensor_children(tensor: Any) -> list[Child]:
    from flexinspect_hooks.debugger import value_descriptions

    found: list[Child] = [
        ("shape", tuple(tensor.shape), ".shape"),
        ("dtype", str(tensor.dtype), None),
        ("device", str(tensor.device), None),
        ("stride", _stride(tensor), ".stride()"),
        ("requires_grad", tensor.requires_grad, ".requires_grad"),
    ]
    if tensor.is_leaf and tensor.grad is not None:
        found.append(("grad", tensor.grad, ".grad"))
    elif tensor.grad_fn is not None:
        found.append(("grad_fn", str(tensor.grad_fn), None))
    if value_descriptions.is_mask(tensor):
        found += _picture_children("picture", value_descriptions.render_mask(tensor))
    if tensor.dim():
        with value_descriptions.torch_modes_disabled():
            # A tensor under vmap has no slices that the client could evaluate.
            real = value_descriptions.unwrap_tensor(tensor)
            slices = [real[n] for n in range(min(len(real), MAX_SLICES))] if real is tensor else []
        found += [(f"[{n}]", one, f"[{n}]") for n, one in enumerate(slices)]
    return found


def _stride(tensor: Any) -> tuple[int, ...] | None:
    try:
        return tuple(tensor.stride())
    except RuntimeError:  # a layout without strides
        return None


def _mask_children(mask: Any) -> list[Child]:
    from flexinspect_hooks.debugger import value_descriptions

    sizes = ("shape", "seq_lengths", "BLOCK_SIZE")
    found: list[Child] = [(name, tuple(getattr(mask, name)), f".{name}") for name in sizes]
    found.append(("mask_mod", mask.mask_mod, ".mask_mod"))
    try:
        found += _picture_children("mask_mod cells", value_descriptions.render_mask_mod(mask))
    except Exception as error:
        found.append(("mask_mod cells", f"raises {type(error).__name__}: {error}", None))
    found += _picture_children("blocks", value_descriptions.render_blocks(mask))
    tables = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    return found + [(name, getattr(mask, name, None), f".{name}") for name in tables]


def _picture_children(name: str, rows: list[str]) -> list[Child]:
    """Return the rows of a picture as children, as clients show one line per value."""
    return [(f"{name} {n:02}", row, None) for n, row in enumerate(rows)]


def _cache_children(cache: Any) -> list[Child]:
    found: list[Child] = []
    for n, layer in enumerate(list(getattr(cache, "layers", ()))[:MAX_SLICES]):
        for part in ("keys", "values"):
            found.append((f"layer {n} {part}", getattr(layer, part, None), f".layers[{n}].{part}"))
    found.append(("layers", getattr(cache, "layers", None), ".layers"))
    return found or list(defaultResolver.get_contents_debug_adapter_protocol(cache))
