"""What makes the runs of these tests faster: what it leaves out is tested in `tests/hooks`."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from torch.nn.attention import flex_attention as flex_module

from flexinspect_hooks.observers.attention import kernel_calls
from flexinspect_hooks.user_code import watch_trace


@pytest.fixture(autouse=True, scope="module")
def _start_quickly() -> Iterator[None]:
    """Search the modules for references to SDPA once per file (15 ms), and do not ask git."""
    search = kernel_calls._references
    with pytest.MonkeyPatch.context() as patches:
        once = functools.cache(lambda target: [*search(target)])
        patches.setattr(kernel_calls, "_references", once)
        patches.setattr(watch_trace, "git_state", lambda folder: None)
        yield


@pytest.fixture(autouse=True)
def _flex_without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run uncompiled FlexAttention without tracing each new mask_mod, which takes 100 ms."""
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture
def flex_with_dynamo(_flex_without_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run FlexAttention as users do: dynamo traces it, also uncompiled."""
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
