"""Where `flexinspect mask` gets its mask: a preset, an expression, code, a prompt, or a trace."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from flexinspect.cli.output import stderr_console
from flexinspect.core import plugins
from flexinspect.core.errors import MaskError, UsageError
from flexinspect.core.languages import Labels
from flexinspect.core.text import did_you_mean
from flexinspect.masks.attention_row import Floats
from flexinspect.masks.cell_mask import CellMask
from flexinspect.masks.census import Report
from flexinspect.masks.known_masks import ArrayMask
from flexinspect.masks.mask_expressions import mask_names, parse_mask
from flexinspect.masks.mask_presets import Segments
from flexinspect.masks.size_presets import (
    MAX_DISPLAY,
    MAX_POSITIONS,
    PRESET_CONFIGS,
    MaskConfig,
    changed_config,
    preset_config,
    read_config,
)
from flexinspect.records.prompt import Segment

DEFAULT_MASK = "segment-isolation"
DEFAULT_LIMIT = 256
"""Rows and keys of a picture whose size was not configured."""

SHAPE_FLAGS = tuple(MaskConfig.__struct_fields__)
_FIXED_BY_PROMPT = ("tokens_per_paraphrase", "separator_tokens")
PROMPT_FLAGS = ("prompt", "dataset", "model", "instruction", "separator", "cue", "indices")
PLACE_FLAGS = ("layer", "step", "view", "generation", "branch")
_NOT_WITH_ALL = ("length", "trace", "head", "verify", "analysis", "animate", "checks", "against")
_CODE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class MaskInput(Struct, frozen=True):
    """A mask and what is known about its positions.

    `limit` is the most rows and keys of a picture. `declared` is the mask to compare with, and
    `shows_difference` whether the picture shows the difference. `note` is printed on stderr.
    `newest_rows` reads the attention of each step's newest row from a trace; it reports its share.
    """

    mask: CellMask
    n_rows: int
    n_keys: int
    limit: int
    segments: tuple[Segment, ...] = ()
    words: Mapping[int, str] = field(default_factory=dict)
    declared: CellMask | None = None
    shows_difference: bool = False
    note: str = ""
    newest_rows: Callable[[Report | None], list[Floats | None]] | None = None


def load_input(args: argparse.Namespace, labels: Labels) -> MaskInput:
    """Return the mask that the flags select. Raises `FlexInspectError` for anything wrong."""
    _check_sources(args)
    if args.trace is not None:
        return _with_declared(args, _trace_input(args, labels))
    if args.prompt or args.dataset:
        return _with_declared(args, _prompt_input(args))
    if args.length is not None:
        if (n := args.length) > MAX_POSITIONS:
            raise UsageError(f"--length {n} is more than {MAX_POSITIONS} tokens.")
        mask = load_mask(args.mask or args.what or "causal", (), args)
        _check_array(mask, n, n)
        return _with_declared(args, MaskInput(mask, n, n, _limit(args, n)))
    return _with_declared(args, _configured_input(args))


def _check_sources(args: argparse.Namespace) -> None:
    """Raise `UsageError` for flags of several sources."""
    sources = {
        "--trace": args.trace is not None,
        "--prompt": bool(args.prompt),
        "--dataset": args.dataset is not None,
        "--length": args.length is not None,
    }
    given = [name for name, is_given in sources.items() if is_given]
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} exclude each other.")
    if args.trace is not None and (args.mask or args.what):
        hint = "Compare it with another mask: --against MASK."
        raise UsageError("A trace has its own mask, and another one is named.", hint=hint)
    if args.trace is None and (given_place := _first_set(args, PLACE_FLAGS)):
        raise UsageError(f"--{given_place} goes with --trace.")
    if args.view == "received" and args.verify:
        what = "--view received shows blocks; the mask_mod closes cells in them, as it should."
        raise UsageError(what, hint="Verify the executed mask: leave out --view.")
    if args.checks is not None and not args.verify:
        raise UsageError("--checks goes with --verify.")
    if not (args.prompt or args.dataset) and (prompt := _first_set(args, PROMPT_FLAGS)):
        raise UsageError(f"--{prompt} goes with --prompt or --dataset.")
    if given:
        is_prompt = given[0] in ("--prompt", "--dataset")
        shape = _first_set(args, _FIXED_BY_PROMPT if is_prompt else SHAPE_FLAGS[:4])
        name = args.what if args.what in PRESET_CONFIGS else shape and _flag(shape)
        if name:
            raise UsageError(f"{given[0]} decides the sizes, and {name} does too.")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _first_set(args: argparse.Namespace, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if getattr(args, name) is not None), None)


def _with_declared(args: argparse.Namespace, found: MaskInput) -> MaskInput:
    """Return the input with the mask of --against as the declared one."""
    if args.against is None:
        return found
    declared = load_mask(args.against, found.segments, args)
    _check_array(declared, found.n_rows, found.n_keys)
    return replace(found, declared=declared, shows_difference=True)


def _check_array(mask: CellMask, n_rows: int, n_keys: int) -> None:
    """Raise `UsageError` for the cells of a file whose size is not that of the sequence."""
    if isinstance(mask, ArrayMask) and mask.array.shape[1:] != (n_rows, n_keys):
        rows, keys = mask.array.shape[1:]
        what = (
            f"The mask {mask.name} has {rows} × {keys} cells, and {n_rows} × {n_keys} are needed."
        )
        raise UsageError(what, hint="Save the cells of the whole sequence, or change the sizes.")


def preset_inputs(args: argparse.Namespace) -> dict[str, MaskInput]:
    """Return the mask over the sizes of each preset (--all).

    Raises `UsageError` for flags that choose another mask or another action.
    """
    ignored = ("what", *SHAPE_FLAGS, *PROMPT_FLAGS, *PLACE_FLAGS, *_NOT_WITH_ALL)
    if name := next((name for name in ignored if getattr(args, name) not in (None, False)), None):
        shown = args.what if name == "what" else _flag(name)
        raise UsageError(f"--all draws all presets of sizes, and {shown} does not go with it.")
    found = {}
    for name, config in PRESET_CONFIGS.items():
        segments, n = config.segments(), config.length
        mask = load_mask(args.mask or DEFAULT_MASK, segments, args)
        _check_array(mask, n, n)
        found[name] = MaskInput(mask, n, n, config.display_limit(), segments)
    return found


def load_mask(text: str, segments: Segments, args: argparse.Namespace) -> CellMask:
    """Return the mask of an expression, of `module:mask_mod`, or of the cells in a .npy file.

    Raises `MaskError`, also for an array that is no mask.
    """
    if text.lower().endswith(".npy"):
        return _read_array(Path(text))
    if _CODE.fullmatch(text):
        with stderr_console().status("importing torch …"):
            load = plugins.load(plugins.CAPTURE, "mask-mod")
            mask: CellMask = load(text, segments, device=args.device, heads=args.heads)
        return mask
    return parse_mask(text, segments)


def _read_array(file: Path) -> ArrayMask:
    try:
        array = np.load(file, allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python, and raises what that raises
        reason = getattr(error, "strerror", None) or "it is not a NumPy array"
        raise MaskError(f"The mask {file} cannot be read: {reason}.") from error
    is_mask = isinstance(array, np.ndarray) and array.ndim in (2, 3) and array.size > 0
    if not is_mask or array.dtype.kind not in "biu" or not np.isin(array, (0, 1)).all():
        what = "is not a mask: bool (rows, keys) or (heads, rows, keys)"
        raise MaskError(f"The array in {file} {what}.", hint="Save it with numpy.save(file, mask).")
    cells = array.astype(np.bool_)
    return ArrayMask(file.stem, cells[None] if cells.ndim == 2 else cells)


def _limit(args: argparse.Namespace, n: int) -> int:
    """Return the most rows and keys of a picture of `n` positions that has no configuration."""
    if args.display_mode == "full":
        if n > MAX_DISPLAY:
            hint = "Leave out --display-mode full."
            what = f"A picture of all {n} positions is larger than {MAX_DISPLAY} cells."
            raise UsageError(what, hint=hint)
        return n
    return min(_whole(args.max_display_positions, "--max-display-positions") or DEFAULT_LIMIT, n)


def _whole(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_DISPLAY:
        raise UsageError(f"{flag} {text} is not a number from 1 to {MAX_DISPLAY}.")
    return int(text)


# -- a configured ensemble ------------------------------------------------------------------------


def _configured_input(args: argparse.Namespace) -> MaskInput:
    """Return a mask over the segments of a preset, a file or the flags."""
    what, mask_text = args.what, args.mask
    is_shape = what in PRESET_CONFIGS or str(what).lower().endswith((".toml", ".json"))
    if what is not None and not is_shape:
        if mask_text is not None:
            raise UsageError(f"'{what}' and --mask {mask_text} are two masks; leave one out.")
        _check_name(what)
        mask_text = what
    config = shaped_config(args, what if is_shape else None)
    segments = config.segments()
    mask = load_mask(mask_text or DEFAULT_MASK, segments, args)
    if isinstance(mask, ArrayMask):
        return _array_input(
            args, mask, config if is_shape or _first_set(args, SHAPE_FLAGS) else None
        )
    limit = MAX_DISPLAY if args.verify else config.display_limit()
    return MaskInput(mask, config.length, config.length, limit, segments)


def _check_name(name: str) -> None:
    """Raise `UsageError` for a single word that is neither a mask nor a preset of sizes."""
    known = (*PRESET_CONFIGS, *mask_names())
    if re.fullmatch(r"[\w-]+", name) and name not in known:
        hint = did_you_mean(name, known, "List them: flexinspect mask --list.")
        raise UsageError(f"There is no mask and no preset '{name}'.", hint=hint)


def shaped_config(args: argparse.Namespace, what: str | None) -> MaskConfig:
    """Return the configuration of a preset or file, with the changes of the flags."""
    config = PRESET_CONFIGS["small"]
    if what is not None:
        is_preset = what in PRESET_CONFIGS or not what.lower().endswith((".toml", ".json"))
        config = preset_config(what) if is_preset else read_config(Path(what))
    changes: dict[str, Any] = {
        name: value for name in SHAPE_FLAGS if (value := getattr(args, name)) is not None
    }
    numbers = {
        name: _number(name, value) for name, value in changes.items() if name != "display_mode"
    }
    return changed_config(config, "The shape", **{**changes, **numbers}) if changes else config


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise UsageError(f"{_flag(name)} {text} is not a whole number from 0 to {MAX_POSITIONS}.")
    return int(text)


def _array_input(args: argparse.Namespace, mask: ArrayMask, config: MaskConfig | None) -> MaskInput:
    """Return the cells of a file, with the segments of a configuration of the same length."""
    _, n_rows, n_keys = mask.array.shape
    if config is not None:
        _check_array(mask, config.length, config.length)
    segments = () if config is None else config.segments()
    return MaskInput(mask, n_rows, n_keys, _limit(args, max(n_rows, n_keys)), segments)


# -- a real prompt --------------------------------------------------------------------------------


def _prompt_input(args: argparse.Namespace) -> MaskInput:
    """Return a mask over the prompt of the first sample, with its words."""
    from flexinspect.records.job import Job, PromptTexts

    texts = {
        name: value.replace("\\n", "\n").replace("\\t", "\t")
        for name in PromptTexts.__struct_fields__
        if (value := getattr(args, name)) is not None
    }
    names = {"model": args.model, "dataset": args.dataset, "indices": args.indices}
    options: dict[str, Any] = {name: value for name, value in names.items() if value is not None}
    for flag, name in (
        ("num_paraphrases", "num_paraphrases"),
        ("num_generated_tokens", "max_new_tokens"),
    ):
        if (text := getattr(args, flag)) is not None:
            options[name] = _number(flag, text)
    options.setdefault("max_new_tokens", PRESET_CONFIGS["small"].num_generated_tokens)
    job = Job(out="", prompts=tuple(args.prompt or ()), texts=PromptTexts(**texts), **options)
    with stderr_console().status("importing torch and transformers …"):
        compose = plugins.load(plugins.CAPTURE, "prompt-tokens")
        _, prompt, words = next(compose(job))
    segments, n = prompt.segments, prompt.segments[-1].stop
    mask = load_mask(args.mask or args.what or DEFAULT_MASK, segments, args)
    _check_array(mask, n, n)
    return MaskInput(mask, n, n, _limit(args, n), segments, words)


# -- a trace --------------------------------------------------------------------------------------


def _trace_input(args: argparse.Namespace, labels: Labels) -> MaskInput:
    """Return the mask of a place of a trace, whose reader stays open."""
    from flexinspect.cli.show import requested_place
    from flexinspect.panels.attention.newest_rows import load_newest_rows
    from flexinspect.panels.mask.trace_mask import TraceView, load_trace_mask
    from flexinspect.panels.panel_source import Source
    from flexinspect.trace.reader import open_trace

    reader = open_trace(args.trace)
    place = requested_place(args, reader)
    source = Source(reader)
    view: TraceView = args.view or "executed"
    found = load_trace_mask(source, place, view, last_step=args.step, labels=labels)
    last = reader.last_step(place.generation, place.branch) or 0
    n_steps = 1 + (last if args.step is None else min(args.step, last))
    note = ""
    if found.n_unknown:
        note = f"{found.n_unknown} rows were not recorded; they are shown as closed."
    return MaskInput(
        found.mask,
        found.n_rows,
        found.n_keys,
        _limit(args, max(found.n_rows, found.n_keys)),
        found.segments,
        found.words,
        found.declared,
        view == "difference",
        note,
        partial(load_newest_rows, source, place, n_steps),
    )
