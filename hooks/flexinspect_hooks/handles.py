"""Whether hooks are where they were put: a program may take out every hook that it finds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.hooks import RemovableHandle

HOOKS_REMOVED = "The program took hooks of the capture out of the model"


def are_installed(removes: Iterable[Any]) -> bool:
    """Say whether each hook is in place that one of these would take out of a module."""
    handles = (getattr(remove, "__self__", None) for remove in removes)
    return all(_is_installed(one) for one in handles if isinstance(one, RemovableHandle))


def _is_installed(handle: RemovableHandle) -> bool:
    hooks = handle.hooks_dict_ref()
    return hooks is not None and handle.id in hooks
