"""The table of configurations on which `flexinspect kernels` compares attention kernels.

A configuration is a shape, a dtype and what is applied to the scores. The built-in table covers
what kernels get wrong most often; a TOML file adds configurations and kernels of the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from flexinspect.core.environment import read_text
from flexinspect.core.errors import UsageError
from flexinspect.core.parsing import parse_toml
from flexinspect.core.text import did_you_mean

DTYPES = ("float16", "bfloat16", "float32", "float64")
MASKS = ("none", "causal", "window:N", "prefix:N", "document:N", "padding:N")
SCORE_MODS = ("", "alibi", "relative")
MAX_CELLS = 1 << 28
"""Largest batch x heads x rows x keys: the oracle holds the scores of all of them in float64."""


class KernelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One configuration.

    `mask` is "none", "causal" (row i attends to the keys up to `i + kv_len - q_len`), "window:N"
    (causal, the newest N keys), "prefix:N" (causal, and the first N keys for every row),
    "document:N" (causal within documents of N tokens), "padding:N" (causal, and the first N keys
    are padding, whose own rows are empty), or "module:function", a `mask_mod`. `score_mod` is "",
    "alibi", "relative", or "module:function". `scale` None is `1 / sqrt(head_dim)`. A `softcap` c
    replaces each scaled score by `c * tanh(score / c)`, before `score_mod` and mask. `block_size`
    is that of the `BlockMask`.
    """

    name: str
    dtype: str = "float32"
    batch: int = 1
    q_heads: int = 4
    kv_heads: int = 4
    q_len: int = 128
    kv_len: int = 128
    head_dim: int = 64
    mask: str = "none"
    score_mod: str = ""
    scale: float | None = None
    softcap: float | None = None
    block_size: int = 128

    def describe(self) -> str:
        """Return the configuration in one line."""
        heads = f"{self.q_heads} heads" if self.q_heads == self.kv_heads else ""
        heads = heads or f"{self.q_heads} query and {self.kv_heads} key heads"
        parts = [self.dtype, f"batch {self.batch}", heads, f"{self.q_len} x {self.kv_len}"]
        parts += [f"head size {self.head_dim}", f"mask {self.mask}"]
        parts += [f"score_mod {self.score_mod}"] * bool(self.score_mod)
        parts += [] if self.scale is None else [f"scale {self.scale:g}"]
        parts += [] if self.softcap is None else [f"softcap {self.softcap:g}"]
        return ", ".join([*parts, f"blocks of {self.block_size}"])

    @property
    def used_scale(self) -> float:
        """The factor of the scores."""
        return float(self.head_dim**-0.5) if self.scale is None else self.scale


class KernelEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user's kernel, and what it states about itself.

    `function` is "module:function"; `previous` are its older versions, compared beside it.
    `layout` is "bhsd" (batch, heads, rows, head size) or "bshd". `capability` is the lowest
    compute capability, such as "8.0".
    """

    name: str
    function: str
    previous: tuple[str, ...] = ()
    layout: str = "bhsd"
    capability: str = ""
    dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    device: str = ""


class KernelTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The configurations and the kernels of a table, in order."""

    config: tuple[KernelConfig, ...] = ()
    kernel: tuple[KernelEntry, ...] = ()


class TracePoint(Struct, frozen=True):
    """The layer of a step in a trace from which q, k and v are taken."""

    trace: str
    generation: int = 0
    branch: int = 0
    step: int = 0
    layer: int = 0


class KernelRequest(Struct, frozen=True, kw_only=True):
    """What `flexinspect kernels` compares or times; the fields are its flags."""

    kernels: tuple[str, ...] = ("flex",)
    reference: str = "eager"
    configs: tuple[str, ...] = ("causal-float32",)
    table: str = ""
    inputs: str = "normal"
    seed: int = 0
    device: str = "auto"
    n_runs: int = 3
    gradients: bool = True
    kernel_options: tuple[str, ...] = ()
    point: TracePoint | None = None
    lengths: tuple[int, ...] = ()
    repeats: int = 20
    threads: int | None = None


def _config(name: str, **fields: Any) -> KernelConfig:
    return KernelConfig(name=name, **fields)


_GQA = {"q_heads": 8, "kv_heads": 2}
BUILT_IN = (
    _config("full-float32"),
    _config("causal-float32", mask="causal"),
    _config("causal-float16", mask="causal", dtype="float16"),
    _config("causal-bfloat16", mask="causal", dtype="bfloat16"),
    _config("gqa-float32", mask="causal", **_GQA),
    _config("gqa-bfloat16", mask="causal", dtype="bfloat16", **_GQA),
    _config("window-float32", mask="window:32", q_len=160, kv_len=160),
    _config("prefix-float32", mask="prefix:40"),
    _config("document-float32", mask="document:48", q_len=160, kv_len=160),
    _config("blocks-float32", mask="document:48", q_len=160, kv_len=160, block_size=32),
    _config("padding-float32", mask="padding:7", batch=2),
    _config("ragged-float32", mask="causal", q_len=75, kv_len=141, head_dim=32, batch=2),
    _config("decode-float32", mask="causal", q_len=1, kv_len=200, **_GQA),
    _config("scale-float32", mask="causal", scale=0.3),
    _config("softcap-float32", mask="causal", softcap=2.0),
    _config("alibi-float32", mask="causal", score_mod="alibi"),
    _config("long-float16", dtype="float16", q_heads=1, kv_heads=1, q_len=64, kv_len=2048),
)
"""The built-in table: each runs in less than a second on a CPU."""


def read_table(file: Path | None) -> KernelTable:
    """Return the built-in configurations, and before them those of a TOML file.

    The file has tables `[[config]]` with the fields of `KernelConfig` and `[[kernel]]` with those
    of `KernelEntry`. Raises `UsageError`, which names the file, for anything else.
    """
    if file is None:
        return KernelTable(BUILT_IN)
    hint = "docs/kernels.md describes the tables [[config]] and [[kernel]]."
    try:
        table = msgspec.convert(parse_toml(read_text(file, "table of kernels")), KernelTable)
    except ValueError as error:
        raise UsageError(f"{file} is not a table of kernels: {error}.", hint=hint) from error
    for what, names in (
        ("configuration", [each.name for each in table.config]),
        ("kernel", [each.name for each in table.kernel]),
    ):
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"{file} has two entries of the {what} {twice[0]}.")
    for config in table.config:
        check_config(config)
    own = {each.name for each in table.config}
    rest = tuple(each for each in BUILT_IN if each.name not in own)
    return replace(table, config=(*table.config, *rest))


def choose_configs(table: KernelTable, names: Sequence[str]) -> tuple[KernelConfig, ...]:
    """Return the configurations of these names, all of them for "all". Raises `UsageError`."""
    if "all" in names:
        return table.config
    known = {config.name: config for config in table.config}
    for name in names:
        if name not in known:
            default = "flexinspect kernels --list prints the table."
            what = f"There is no configuration '{name}'."
            raise UsageError(what, hint=did_you_mean(name, known, default))
    return tuple(known[name] for name in dict.fromkeys(names))


def config_from(fields: Mapping[str, Any]) -> KernelConfig:
    """Return a checked configuration from its fields; a name is optional. Raises `UsageError`."""
    try:
        config = msgspec.convert({"name": "own", **fields}, KernelConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"This is not a configuration of kernels: {error}.") from error
    check_config(config)
    return config


def check_config(config: KernelConfig) -> None:
    """Raise `UsageError` with a sentence for a configuration that no kernel could run."""
    for problem in _problems(config):
        raise UsageError(f"The configuration {config.name} {problem}.")


def _problems(config: KernelConfig) -> list[str]:
    sizes = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "block_size")
    fields = asdict(config)
    out = [f"has {name} = {fields[name]}, which is below 1" for name in sizes if fields[name] < 1]
    if out:
        return out
    if config.dtype not in DTYPES:
        out.append(f"has the dtype {config.dtype}; known: {', '.join(DTYPES)}")
    if config.q_heads % config.kv_heads:
        out.append(
            f"has {config.q_heads} query heads, not a multiple of its {config.kv_heads} key heads"
        )
    if config.batch * config.q_heads * config.q_len * config.kv_len > MAX_CELLS:
        out.append("is larger than the oracle can hold (batch x heads x rows x keys up to 2^28)")
    kind, _, number = config.mask.partition(":")
    takes_number = f"{kind}:N" in MASKS
    if (kind in ("none", "causal") and number) or (takes_number and not _is_positive(number)):
        out.append(f"has the mask {config.mask}; {kind} takes {_number_form(takes_number)}")
    elif kind not in ("none", "causal") and not takes_number and not number:
        out.append(f"has the mask {config.mask}; known: {', '.join(MASKS)}, module:function")
    if config.score_mod not in SCORE_MODS and ":" not in config.score_mod:
        known = ", ".join(filter(None, SCORE_MODS))
        out.append(f"has the score_mod {config.score_mod}; known: {known}, module:function")
    if config.softcap is not None and not config.softcap > 0:
        out.append(f"has softcap = {config.softcap:g}, which is not above 0")
    return out


def _is_positive(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _number_form(takes_number: bool) -> str:
    return "a whole number above 0 after the colon" if takes_number else "no number"
