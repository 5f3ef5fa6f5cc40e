"""A sliding window that a configuration asks for, and that is in none of its layers.

Some configurations derive `layer_types` from other fields when they are made, and not again when a
program sets these fields afterwards.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from torch import nn

from flexinspect_hooks.loading.library_output import quiet_libraries

_SLIDING = "sliding_attention"


def unused_window(model: nn.Module) -> dict[str, Any] | None:
    """Return the window and the layers that a configuration made of the same fields would have.

    None if some layer has a window, or if such a configuration has none either.
    """
    config: Any = getattr(model, "config", None)
    with suppress(Exception):  # a configuration may be of any kind
        text = config.get_text_config(decoder=True)
        types, window = text.layer_types, text.sliding_window
        is_asked = text.use_sliding_window is True and isinstance(window, int) and window > 0
        if not is_asked or not types or _SLIDING in types:
            return None
        layers = [n for n, kind in enumerate(_derived(text)) if kind == _SLIDING]
        if layers and len(types) > layers[-1]:
            return {"window": window, "layers": layers, "config": type(text).__name__}
    return None


def _derived(config: Any) -> list[str]:
    """Return the types of layers of a configuration that is made of the same fields."""
    fields = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    known = inspect.signature(type(config).__init__).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        fields = {name: value for name, value in fields.items() if name in known}
    with quiet_libraries(lambda what, data: None):
        return list(type(config)(**fields).layer_types)
