"""Errors of loading a model, each as a `ModelError` with one sentence and the next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexinspect.core.errors import ModelError
from flexinspect.inputs.model_names import ModelSource, read_config_file

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


def require_known_architecture(folder: Path, source: ModelSource, *, trusted: bool) -> None:
    """Raise `ModelError` for an unknown architecture, or one with its own code unless trusted."""
    from transformers import CONFIG_MAPPING, __version__

    config = read_config_file(folder / "config.json")
    kind = config.get("model_type")
    own_code = bool(config.get("auto_map"))
    if kind in CONFIG_MAPPING or (own_code and trusted):
        return
    if own_code:
        raise ModelError(
            f"The model {source.name} has its own Python code (architecture {kind!r}), and "
            "flexinspect does not run remote code by default.",
            hint="Read that code; if you trust it, add --trust-remote-code.",
        )
    raise ModelError(
        f"The architecture {kind!r} of {source.name} is not known to transformers {__version__}."
        if kind
        else f"The configuration in {folder} has no model_type.",
        hint="A newer transformers may know it: pip install -U transformers.",
    )


def require_causal_lm(config: Any, source: ModelSource) -> None:
    """Raise `ModelError` if the model is not a causal language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "auto_map", None) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return  # its own code decides
    known: tuple[str, ...] = ()
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        classes = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        classes = classes if isinstance(classes, tuple | list) else (classes,)
        known = tuple(each.__name__ for each in classes)
    declared = config.architectures or known
    if not known or not set(declared) & set(known):
        names = ", ".join(declared) or config.model_type
        raise ModelError(
            f"The model {source.name} ({names}) is not a causal language model.",
            hint="Choose one that generates text from left to right, such as llama3.2_1b_it.",
        )


def require_all_values(info: Any, folder: Path) -> None:
    """Raise `ModelError` if the weight files do not contain all parameters of the model.

    `info` is the loading info of `from_pretrained`.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"The weights in {folder} have no values for {len(missing)} parameters, the first is "
            f"{missing[0]}.",
            hint="The files belong to another configuration; download weights and config.json "
            "together.",
        )


def explain_load_error(error: Exception, source: ModelSource, device: str) -> ModelError:
    """Return an exception of torch, transformers or safetensors as a `ModelError`."""
    text = str(error)
    if isinstance(error, MemoryError) or any(part in text.lower() for part in _OUT_OF_MEMORY):
        return ModelError(
            f"The memory of {device} ran out while {source.name} was loaded.",
            hint="Choose a smaller model, --dtype bfloat16, another --device, or end other "
            "programs that use memory.",
        )
    if type(error).__name__ == "SafetensorError":
        return ModelError(
            f"The weight files of {source.name} in {source.place} are damaged "
            f"({first_line(error)}).",
            hint="Fetch them again.",
        )
    if isinstance(error, ImportError):
        return ModelError(
            f"The model {source.name} needs a package that is not installed ({first_line(error)}).",
            hint="Install it, then try again.",
        )
    if "trust_remote_code" in text:
        return ModelError(
            f"The model {source.name} wants to run its own Python code.",
            hint="Read that code; if you trust it, add --trust-remote-code.",
        )
    return ModelError(
        f"The model {source.name} cannot be loaded: {type(error).__name__}: {first_line(error)}",
        hint="Check config.json and the versions of torch and transformers.",
    )


def first_line(error: BaseException, limit: int = 200) -> str:
    """Return the first line of an error's text, cut to `limit` characters."""
    lines = str(error).strip().splitlines()
    line = lines[0].strip() if lines else type(error).__name__
    return line if len(line) <= limit else line[: limit - 1] + "…"
