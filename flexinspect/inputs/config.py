"""User settings: `flexinspect.toml`, `[tool.flexinspect]` in pyproject.toml, and a per-user file.

The project settings are the nearest file from the current folder upwards. They override the
per-user file `~/.config/flexinspect/config.toml` (in `XDG_CONFIG_HOME` or, on Windows, `APPDATA` if
set). There are four sections:

    [models]
    my_model = "org/name"                              # a hub id, an alias, or
    local = "checkpoints/step-1000"                    # a folder, relative to this file
    big = { path = "org/name", dtype = "bfloat16" }    # with the dtype to run in

    [keys]                                             # keys of the interface's actions
    "step.next" = "w"
    "step.previous" = ["e", "left"]

    [breakpoints]                                      # for every run: see docs/breakpoints.md
    leaks = "finding mask.* >= warning"
    unsure = "entropy > 3 and step > 2 [once]"

    [debugging]                                        # switches of the training debuggers
    gradient_norms = true                              # the others are off

    [debugging.production]                             # switches of a named profile
    memory_usage = true
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexinspect.core.errors import UsageError
from flexinspect.inputs.model_sizes import canonical_dtype

SECTIONS = ("models", "keys", "breakpoints", "debugging")
_SECTIONS_LISTED = " and ".join(", ".join(f"[{name}]" for name in SECTIONS).rsplit(", ", 1))
_ALIAS_KEYS = ("path", "dtype")


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """A model name that the user defined.

    `target` is as written: a hub id, a built-in alias, or a folder relative to `file`'s folder.
    """

    alias: str
    target: str
    dtype: str | None
    file: Path

    @property
    def folder(self) -> Path:
        """The absolute path of the target if it is a folder."""
        return (self.file.parent / expand_user(self.target)).resolve()


def expand_user(path: str) -> Path:
    """Return the path with `~` replaced, or as it is where that user has no home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


@dataclass(frozen=True, slots=True)
class Config:
    """The user's settings; `files` are the files that were read, in order of precedence.

    `keys` maps key ids of `flexinspect.core.keyboard` to keys separated by commas, `breakpoints`
    maps names to conditions. `debugging` maps profiles ("" for the section itself) to switches by
    full name.
    """

    models: Mapping[str, ModelAlias] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    breakpoints: Mapping[str, str] = field(default_factory=dict)
    debugging: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def load_config(start: Path | None = None) -> Config:
    """Read the project settings, searched upwards from `start` (default: cwd), and the user's file.

    Raises `UsageError` with file and line for invalid TOML, unknown sections, wrong types, invalid
    breakpoints, and keys that do not exist or that two actions would share.
    """
    models: dict[str, ModelAlias] = {}
    keys: dict[str, tuple[str, ...]] = {}
    sources: dict[str, tuple[Path, str]] = {}
    breakpoints: dict[str, str] = {}
    debugging: dict[str, dict[str, bool]] = {}
    files = []
    for source in (_project_settings(start or Path.cwd()), _user_settings()):
        if source is None:
            continue
        file, text, settings = source
        files.append(file)
        for alias, entry in _model_aliases(file, text, settings).items():
            models.setdefault(alias, entry)
        for action, names in _read_keys(file, text, settings.get("keys", {})).items():
            keys.setdefault(action, names)
            sources.setdefault(action, (file, text))
        breakpoints = _read_breakpoints(file, text, settings.get("breakpoints", {})) | breakpoints
        for profile, switches in _read_debugging(file, text, settings.get("debugging", {})).items():
            debugging[profile] = {**switches, **debugging.get(profile, {})}
    _check_shared_keys(keys, sources)
    joined = {name: ",".join(keys[name]) for name in keys}
    return Config(models, joined, breakpoints, debugging, tuple(files))


_SettingsFile = tuple[Path, str, Mapping[str, Any]]


def _project_settings(start: Path) -> _SettingsFile | None:
    for folder in (start.resolve(), *start.resolve().parents):
        file = folder / "flexinspect.toml"
        if file.is_file():
            text = _read_text(file)
            return file, text, _parse_toml(file, text)
        shared = folder / "pyproject.toml"
        # Another project's broken pyproject.toml is not ours to complain about.
        if shared.is_file() and "tool.flexinspect" in (text := _read_text(shared)):
            settings = _parse_toml(shared, text).get("tool", {}).get("flexinspect")
            if settings is not None:
                return shared, text, settings
    return None


def user_config_file() -> Path | None:
    """Return the path of the per-user file (it may not exist), None without a home folder."""
    base = os.environ.get("XDG_CONFIG_HOME")
    if not base and sys.platform == "win32":
        base = os.environ.get("APPDATA")
    try:
        root = Path(base) if base else Path.home() / ".config"
    except RuntimeError:
        return None
    return root / "flexinspect" / "config.toml"


def _user_settings() -> _SettingsFile | None:
    file = user_config_file()
    if file is None or not file.is_file():
        return None
    text = _read_text(file)
    return file, text, _parse_toml(file, text)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"The settings file {file} cannot be read: {reason}.") from error


def _parse_toml(file: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        where = f"{file}:{line[1]}" if line else f"{file}, at its end"
        what = re.sub(r" \(at .*\)$", "", str(error))
        raise UsageError(
            f"{where}: this is not valid TOML ({what}).", hint="Correct that line."
        ) from error


def _model_aliases(file: Path, text: str, settings: object) -> dict[str, ModelAlias]:
    if not isinstance(settings, dict):
        raise _settings_error(file, text, "flexinspect", "[tool.flexinspect] must be a table")
    for name in settings:
        if name not in SECTIONS:
            near = difflib.get_close_matches(name, SECTIONS, 1)
            ask = f"; did you mean [{near[0]}]?" if near else f"; known: {_SECTIONS_LISTED}"
            raise _settings_error(file, text, name, f"the section {name!r} is unknown{ask}")
    table = settings.get("models", {})
    if not isinstance(table, dict):
        raise _settings_error(file, text, "models", "[models] must be a table of alias = path")
    return {alias: _model_alias(file, text, alias, value) for alias, value in table.items()}


def _read_keys(file: Path, text: str, table: object) -> dict[str, tuple[str, ...]]:
    from flexinspect.core.keyboard import all_keys

    if not isinstance(table, dict):
        raise _settings_error(
            file, text, "keys", '[keys] must be a table of "action" = "key"', hint=_KEYS_HINT
        )
    known = {key.id for key in all_keys()}
    for action in table:
        if action not in known:
            near = difflib.get_close_matches(action, known, 1)
            ask = f"; did you mean {near[0]!r}?" if near else ""
            raise _settings_error(
                file, text, action, f"no action is called {action!r}{ask}", hint=_KEYS_HINT
            )
    return {action: _action_keys(file, text, action, value) for action, value in table.items()}


def _read_breakpoints(file: Path, text: str, table: object) -> dict[str, str]:
    if not isinstance(table, dict):
        what = '[breakpoints] must be a table of name = "condition"'
        raise _settings_error(file, text, "breakpoints", what, hint=_BREAKPOINTS_HINT)
    if not table:
        return {}
    from flexinspect.breakpoints import BreakpointStore, ExpressionError

    store = BreakpointStore()
    for name, condition in table.items():
        if not isinstance(condition, str):
            what = f"the breakpoint {name!r} needs a condition in quotes"
            raise _settings_error(file, text, name, what, hint=_BREAKPOINTS_HINT)
        try:
            store.add(condition)
        except ExpressionError as error:
            raise error.with_location(f"{file}:{_line_of(text, name)}") from None
    return dict(table)


def _action_keys(file: Path, text: str, action: str, value: object) -> tuple[str, ...]:
    """Return the keys of one action as Textual names them."""
    from flexinspect.core.keyboard import KEY_SYNTAX, parse_key

    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        what = f"the action {action!r} needs a key, or a list of keys"
        raise _settings_error(file, text, action, what, hint=_KEYS_HINT)
    keys = []
    for name in names:
        key = parse_key(name)
        if key is None:
            what = f"the action {action!r} has {name!r}, which is not a key"
            raise _settings_error(file, text, action, what, hint=KEY_SYNTAX)
        keys.append(key)
    return tuple(dict.fromkeys(keys))


def _check_shared_keys(
    keys: Mapping[str, tuple[str, ...]], sources: Mapping[str, tuple[Path, str]]
) -> None:
    """Refuse a key that another action uses, unless that action gets another key."""
    if not keys:
        return
    from flexinspect.core.keyboard import FIXED_KEYS, find_key_conflict

    clash = find_key_conflict(keys)
    if clash is None:
        return
    what = f"the action {clash.action!r} has {clash.key!r}, which {clash.other!r} already uses"
    hint = f"Choose another key, or assign another key to {clash.other!r} here as well."
    if FIXED_KEYS.get(clash.other) == clash.key:
        hint = f"{clash.key!r} always belongs to {clash.other!r}; choose another key."
    raise _settings_error(*sources[clash.action], clash.action, what, hint=hint)


_BREAKPOINTS_HINT = 'For example unsure = "entropy > 3 and step > 2".'


def _read_debugging(file: Path, text: str, table: object) -> dict[str, dict[str, bool]]:
    """Return the switches of each profile; "" is the section itself."""
    if not isinstance(table, dict):
        raise _settings_error(
            file, text, "debugging", "[debugging] must be a table of switches", hint=_SWITCHES_HINT
        )
    profiles = {name: value for name, value in table.items() if isinstance(value, dict)}
    base = {name: value for name, value in table.items() if name not in profiles}
    return {
        profile: _read_switches(file, text, switches)
        for profile, switches in {"": base, **profiles}.items()
    }


def _read_switches(file: Path, text: str, table: Mapping[str, object]) -> dict[str, bool]:
    from flexinspect.records.debug_switches import parse_switch

    settings = {}
    for name, value in table.items():
        try:
            switch = parse_switch(name)
        except UsageError as error:
            raise _settings_error(
                file, text, name, error.message.rstrip("."), hint=_SWITCHES_HINT
            ) from None
        if not isinstance(value, bool):
            raise _settings_error(
                file, text, name, f"the switch {name!r} must be true or false", hint=_SWITCHES_HINT
            )
        settings[switch] = value
    return settings


_SWITCHES_HINT = 'For example, in [debugging]: "memory_usage = true".'
_KEYS_HINT = 'For example "step.next" = "w"; the palette of the interface (p) lists every action.'


def _model_alias(file: Path, text: str, alias: str, value: object) -> ModelAlias:
    entry = {"path": value} if isinstance(value, str) else value
    if not isinstance(entry, dict):
        raise _settings_error(
            file, text, alias, f"the model {alias!r} must be a string or a table {{ path = ... }}"
        )
    for key in entry:
        if key not in _ALIAS_KEYS:
            raise _settings_error(
                file, text, alias, f"the model {alias!r} has an unknown key {key!r}"
            )
    target, dtype = entry.get("path"), entry.get("dtype")
    if not isinstance(target, str) or not target.strip():
        raise _settings_error(
            file, text, alias, f"the model {alias!r} needs a path: a hub id or a folder"
        )
    if dtype is not None:
        dtype = _dtype(file, text, alias, dtype)
    return ModelAlias(alias, target.strip(), dtype, file)


def _dtype(file: Path, text: str, alias: str, dtype: object) -> str:
    try:
        return canonical_dtype(str(dtype))
    except UsageError as error:
        message = f"the model {alias!r} has an unknown dtype {dtype!r}"
        raise _settings_error(file, text, alias, message, hint=error.hint) from None


def _settings_error(
    file: Path, text: str, key: str, message: str, hint: str | None = None
) -> UsageError:
    return UsageError(
        f"{file}:{_line_of(text, key)}: {message}{'' if message.endswith('?') else '.'}",
        hint=hint or "See `flexinspect models --help` for the form.",
    )


def _line_of(text: str, key: str) -> int:
    # tomllib keeps no positions; the first line that assigns or opens the key is the one meant.
    pattern = re.compile(
        rf"""^\s*(?:\[+[^\]#]*\b{re.escape(key)}["']?\s*\]|["']?{re.escape(key)}["']?\s*[.=])"""
    )
    for number, line in enumerate(text.splitlines(), start=1):
        if pattern.match(line):
            return number
    return 1
