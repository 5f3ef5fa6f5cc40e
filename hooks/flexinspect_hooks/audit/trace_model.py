"""Makes the model of a trace again, and compares its weights with the samples in the trace."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from flexinspect.core.errors import FlexInspectError
from flexinspect.core.text import plural
from flexinspect.inputs.config import load_config
from flexinspect.inputs.hub_download import OnLoadProgress
from flexinspect.inputs.model_names import ModelSource, resolve
from flexinspect.trace.reader import TraceReader
from flexinspect_hooks.observers.hidden_digests import sample_weights
from flexinspect_hooks.step_writer.layer_records import WEIGHTS_STREAM

_NUMBER = re.compile(r" \(\d+\)$")
_SCRIPT_HINT = (
    "Audit the program itself: flexinspect audit SCRIPT, or name the folder: --model PATH."
)


def model_source(run: Mapping[str, Any], facts: Mapping[str, Any], path: str | None) -> ModelSource:
    """Return where the weights of a recorded model are, on this machine.

    `run` is the manifest, `facts` are those of the model, and `path` is a name that the user gave.
    Raises `FlexInspectError` if the weights are not here.
    """
    if path is not None:
        source = resolve(path, load_config())
    else:
        # Further models of the same name have a number in a trace.
        name = _NUMBER.sub("", str(facts.get("name", "")))
        if not name or name == facts.get("class"):
            what = (
                f"The trace names no weights of its {name or 'model'}, only the program has them."
            )
            raise FlexInspectError(what, hint=_SCRIPT_HINT)
        folder = Path(str(run.get("cwd", ""))) / name
        try:
            source = resolve(str(folder) if folder.is_dir() else name, load_config())
        except FlexInspectError as error:
            raise FlexInspectError(error.message, hint=_SCRIPT_HINT) from error
    if source.where == "download" and facts.get("weights") != "random":
        what = f"The model {source.name} is not on this machine."
        raise FlexInspectError(what, hint=f"flexinspect fetch {source.name}, or --model PATH.")
    return source


def load_recorded_model(
    run: Mapping[str, Any], facts: Mapping[str, Any], source: ModelSource, report: OnLoadProgress
) -> nn.Module:
    """Load the weights of a recorded model in its dtype. Raises `ModelError`."""
    from flexinspect_hooks.loading.model_loader import load

    job = run.get("job")
    job = job if isinstance(job, dict) else {}
    on_cpu = str(facts.get("device", "cpu")) == "cpu"
    loaded = load(
        source,
        device="cpu" if on_cpu else "auto",
        dtype=str(facts.get("dtype") or "auto"),
        weights=str(facts.get("weights") or "pretrained"),
        seed=int(job.get("seed", 0)),
        trust_remote_code=job.get("trust_remote_code") is True,
        report=report,
        needs_tokenizer=False,
    )
    model: nn.Module = loaded.model
    return model


def weights_problem(
    reader: TraceReader, generation: int, model_name: str, model: nn.Module
) -> tuple[str, bool]:
    """Return why a model does not have the weights of a generation, and whether samples tell it.

    The reason is empty for equal samples, and if the trace has none.
    """
    stored = _stored_samples(reader, generation, model_name)
    names = [name for name, _ in model.named_parameters()]
    found = sample_weights(list(model.parameters()))
    if stored is None or found is None:
        return "", False
    if len(stored) != len(names):
        what = f"the run's model has {plural(len(stored), 'parameter')}"
        return f"{what}, and {len(names)} were loaded, so it is another model", True
    same = np.isclose(found.cpu().numpy(), stored, rtol=1e-6, atol=0, equal_nan=True).all(1)
    other = [name for name, is_same in zip(names, same.tolist(), strict=True) if not is_same]
    if not other:
        return "", True
    more = f" and {plural(len(other) - 1, 'other')} differ" if len(other) > 1 else " differs"
    what = f"the weights are not those of the run: {other[0]}{more}"
    return f"{what} (flexinspect audit --model NAME has others, or audit the program)", True


def _stored_samples(reader: TraceReader, generation: int, model_name: str) -> Any:
    """Return the samples of a generation: its own, or the last ones of its model before it."""
    numbers = [
        row.generation
        for row in reader.generations()
        if row.generation <= generation and row.model == model_name
    ]
    for number in reversed(numbers):
        found = reader.array(number, 0, WEIGHTS_STREAM)
        if found is not None:
            return found
    return None
