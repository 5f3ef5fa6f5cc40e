"""Whether a generation is a training run, and which panels have something to say of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexinspect.errors import TraceError
from flexinspect.panels.base import Missing, Panel, TracePlace
from flexinspect.panels.source import Source


def is_training_trace(source: Source) -> bool:
    """Tell whether the trace was made by watching a training run; False while it cannot be read."""
    try:
        return bool(source.reader.run().get("watch_training"))
    except TraceError:
        return False


def training_facts(source: Source, generation: int) -> Mapping[str, Any] | None:
    """Return what a training run says of itself, None for a generation that is none."""
    try:
        about = source.reader.generation(generation).declared.get("training")
    except TraceError:
        return None
    return about if isinstance(about, dict) else None


def check_panel_applies(panel: Panel[Any, Any], source: Source, place: TracePlace) -> None:
    """Raise `Missing`, in a sentence, for a panel of tokens and a generation without any."""
    if panel.needs_tokens and training_facts(source, place.generation) is not None:
        raise Missing(
            f"{panel.title} is about generated tokens, and this is a training run.",
            "Look at Training, Gradient strip, Findings, Memory or Layers instead.",
        )


def require_training_facts(source: Source, place: TracePlace) -> Mapping[str, Any]:
    """Return what the training run says of itself. Raises `Missing` where there is none."""
    about = training_facts(source, place.generation)
    if about is None:
        raise Missing(
            "This generation is no training run.",
            "Record one with flexinspect.watch_training(model, optimizer).",
        )
    return about
