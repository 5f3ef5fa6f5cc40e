"""What a call of `generate` was told: by its arguments, and by the model's generation config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from flexinspect_hooks.python_internals.patching import patch
from flexinspect_hooks.python_internals.torch_private import tensor_version

_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p")
_OPTIONS = (*_SAMPLING, "num_beams", "eos_token_id", "pad_token_id", "min_new_tokens")
_CHANGING = (
    *("no_repeat_ngram_size", "repetition_penalty", "bad_words_ids", "suppress_tokens"),
    *("begin_suppress_tokens", "min_length", "min_new_tokens", "forced_bos_token_id"),
    *("forced_eos_token_id", "exponential_decay_length_penalty"),
)
"""Options whose logits processors are at work in greedy decoding, too."""
_MAX_NAMES = 8


def generate_facts(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a call of `generate` runs with, and which of them it passed.

    `options` are values of the arguments, else of the generation config. `passed` names the options
    that the call itself decides, all of them with a `generation_config`. `has_mask` is whether it
    passed an attention mask. `changing` are options of the model's generation config alone that
    change logits, in greedy decoding as well; `asked` are those that the call passed.
    """
    own = kwargs.get("generation_config")
    configs = [one for one in (own, getattr(model, "generation_config", None)) if one is not None]
    options: dict[str, Any] = {}
    for name in _OPTIONS:
        values = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
        value = next((plain for plain in map(_plain, values) if plain is not None), None)
        if value is not None:
            options[name] = value
    passed = list(_OPTIONS) if own is not None else [n for n in _OPTIONS if n in kwargs]
    has_mask = kwargs.get("attention_mask") is not None
    facts = {"options": options, "passed": passed, "has_mask": has_mask}
    changing = {} if own is not None else _changing_options(model, kwargs)
    asked = _effective({n: kwargs.get(n, getattr(own, n, None)) for n in _CHANGING})
    more = {"changing": changing, "asked": asked}
    return facts | {name: values for name, values in more.items() if values}


def _changing_options(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    config = getattr(model, "generation_config", None)
    return _effective({n: getattr(config, n, None) for n in _CHANGING if n not in kwargs})


def _effective(values: Mapping[str, Any]) -> dict[str, Any]:
    # A penalty of 1.0 changes nothing, nor do lengths of 0 and empty lists.
    return {
        name: _lists(value) for name, value in values.items() if value and value not in (1.0, [[]])
    }


def _lists(value: Any) -> Any:
    """Return a value with tensors and tuples as lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [_lists(one) for one in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.tolist()
    is_list = isinstance(value, list | tuple) and all(isinstance(one, int) for one in value)
    return list(value) if is_list else value if isinstance(value, bool | int | float) else None


# -- the report of a loader ------------------------------------------------------------------------


class LoadingReports:
    """The parameters that `from_pretrained` did not find in a checkpoint, for each model."""

    def __init__(self) -> None:
        self._missing: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()

    def watch(self) -> Callable[[], None]:
        """Read the reports of loaders from now on; returns a function that stops it.

        transformers.modeling_utils must be loaded.
        """
        from transformers import modeling_utils

        original = getattr(modeling_utils, "log_state_dict_report", None)
        if original is None:  # of another version of transformers
            return lambda: None

        def report(*args: Any, **kwargs: Any) -> Any:
            model, info = kwargs.get("model"), kwargs.get("loading_info")
            if isinstance(model, nn.Module):
                names = sorted(getattr(info, "missing_keys", ()) or ())
                place = str(kwargs.get("pretrained_model_name_or_path") or "")
                self._keep(model, names, place)
            return original(*args, **kwargs)

        return patch(modeling_utils, "log_state_dict_report", report)

    def _keep(self, model: nn.Module, names: list[str], place: str) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        found = {name: parameters[name] for name in names if name in parameters}
        if found:
            versions = {name: (id(one), tensor_version(one)) for name, one in found.items()}
            self._missing[model] = {"place": place, "versions": versions}

    def initialised(self, model: nn.Module) -> dict[str, Any] | None:
        """Return which parameters still have the values that they were initialised with.

        Those that the program has set since do not count.
        """
        kept = self._missing.get(model)
        if kept is None:
            return None
        parameters = dict(model.named_parameters(remove_duplicate=False))
        names = [
            name
            for name, version in kept["versions"].items()
            if name in parameters
            and (id(parameters[name]), tensor_version(parameters[name])) == version
        ]
        if not names:
            return None
        facts = {"n": len(names), "names": names[:_MAX_NAMES], "place": kept["place"]}
        return facts | {"class": type(model).__name__}
