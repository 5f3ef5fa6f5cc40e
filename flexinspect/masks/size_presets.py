"""The shape of a paraphrase ensemble: how many paraphrases, how long, and how much is shown.

The keys are those of the visualisation notebook of the self-ensemble project. Separators stand
between paraphrases, not after the last one, so that with 3 paraphrases of 15 tokens and separators
of 2 the first generated token is at position 3 * 15 + 2 * 2 = 49 and attends to 50 keys: 49 tokens
of the prompt and itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict

from flexinspect.core.conversion import convert, read_data
from flexinspect.core.errors import UsageError
from flexinspect.core.text import did_you_mean
from flexinspect.records.prompt import Segment, SegmentKind

MAX_POSITIONS = 1 << 20
"""Most tokens of a sequence."""

MAX_DISPLAY = 4096
"""Most rows and keys of a picture."""

Count = Annotated[int, Meta(ge=0, le=MAX_POSITIONS)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]


class MaskConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of an ensemble and of its picture.

    A picture of `display_mode` "full" has one cell per position, one that is "sampled" at most
    `max_display_positions` rows and keys.
    """

    num_paraphrases: PositiveCount = 3
    tokens_per_paraphrase: PositiveCount = 15
    separator_tokens: Count = 2
    num_generated_tokens: Count = 5
    display_mode: Literal["full", "sampled"] = "full"
    max_display_positions: Annotated[int, Meta(ge=1, le=MAX_DISPLAY)] = 60

    @property
    def prompt_length(self) -> int:
        """The number of tokens of the prompt, and the position of the first generated token."""
        separators = (self.num_paraphrases - 1) * self.separator_tokens
        return self.num_paraphrases * self.tokens_per_paraphrase + separators

    @property
    def length(self) -> int:
        """The number of tokens of the whole sequence."""
        return self.prompt_length + self.num_generated_tokens

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments: paraphrases, the separators between them, and generated tokens."""
        found: list[Segment] = []
        for number in range(1, self.num_paraphrases + 1):
            if number > 1 and self.separator_tokens:
                name = f"separator {number - 1}"
                owner = len(found) - 1
                found.append(
                    _next_segment(found, self.separator_tokens, name, SegmentKind.SEPARATOR, owner)
                )
            name, kind = f"paraphrase {number}", SegmentKind.PARAPHRASE
            found.append(_next_segment(found, self.tokens_per_paraphrase, name, kind, len(found)))
        if self.num_generated_tokens:
            kind = SegmentKind.GENERATED
            generated = _next_segment(
                found, self.num_generated_tokens, "generated", kind, len(found)
            )
            found.append(generated)
        return tuple(found)

    def display_limit(self) -> int:
        """Return the most rows and keys of the picture.

        Raises `UsageError` if every position is to be shown and these are more than `MAX_DISPLAY`.
        """
        if self.display_mode == "sampled":
            return self.max_display_positions
        if self.length > MAX_DISPLAY:
            what = f"A picture of all {self.length} positions is larger than {MAX_DISPLAY} cells."
            raise UsageError(what, hint='Set display_mode to "sampled" (--display-mode sampled).')
        return self.length


def _next_segment(
    before: list[Segment], length: int, label: str, kind: SegmentKind, owner: int
) -> Segment:
    start = before[-1].stop if before else 0
    return Segment(start, start + length, label, kind, owner)


PRESET_CONFIGS: Mapping[str, MaskConfig] = {
    "small": MaskConfig(),
    "medium": MaskConfig(5, 25, 2, 10, "sampled", 40),
    "large": MaskConfig(5, 50, 2, 20, "sampled", 60),
}


def preset_config(name: str) -> MaskConfig:
    """Return a preset. Raises `UsageError` with the nearest name for an unknown one."""
    if name in PRESET_CONFIGS:
        return PRESET_CONFIGS[name]
    hint = did_you_mean(name, PRESET_CONFIGS, f"The presets are {', '.join(PRESET_CONFIGS)}.")
    raise UsageError(f"There is no preset '{name}'.", hint=hint)


def checked_config(values: Mapping[str, Any], where: str = "The configuration") -> MaskConfig:
    """Return a checked configuration from its keys; missing ones are those of `small`.

    Raises `UsageError` with one sentence for an unknown key, a wrong type, and sizes that do not
    fit each other; `where` names the source.
    """
    config = convert(MaskConfig, values, where)
    _check_sizes(config, where)
    return config


def changed_config(config: MaskConfig, where: str, **changes: Any) -> MaskConfig:
    """Return a configuration with changed keys, checked as by `checked_config`."""
    return checked_config({**asdict(config), **changes}, where)


def _check_sizes(config: MaskConfig, where: str) -> None:
    """Raise `UsageError` for sizes that do not fit each other."""
    if config.length > MAX_POSITIONS:
        what = f"{where} describes {config.length} tokens; the most are {MAX_POSITIONS}."
        raise UsageError(what, hint="Reduce num_paraphrases or tokens_per_paraphrase.")
    n_segments = config.num_paraphrases + bool(config.num_generated_tokens)
    if config.display_mode == "sampled" and config.max_display_positions < n_segments:
        what = f"{where} shows {config.max_display_positions} positions of {n_segments} segments."
        raise UsageError(what, hint=f"Set max_display_positions to {n_segments} or more.")


def read_config(file: Path) -> MaskConfig:
    """Return the configuration of a TOML or JSON file.

    Raises `UsageError` for a file that cannot be read, invalid syntax, and as `checked_config`.
    """
    return checked_config(read_data(file, "mask configuration"), str(file))
