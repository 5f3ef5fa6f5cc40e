"""What the capture process reports when the model fails."""

from __future__ import annotations

import pytest
import torch

from flexinspect_hooks.ensemble.capture_process import _describe_failure


@pytest.mark.parametrize("error", [MemoryError("1 GB"), torch.OutOfMemoryError("1 GB")], ids=repr)
def test_a_lack_of_memory_is_reported_with_what_needs_less(error: Exception) -> None:
    failure = _describe_failure(error)
    assert failure.message.startswith("Memory ran out while the model ran: ")
    assert "--dtype bfloat16" in failure.hint


def test_another_exception_is_named_and_the_trace_has_its_traceback() -> None:
    failure = _describe_failure(ValueError("odd"))
    assert failure.message == "The run failed: ValueError: odd"
    assert "flexinspect dump" in failure.hint
