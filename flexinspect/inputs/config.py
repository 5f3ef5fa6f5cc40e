"""User settings: `flexinspect.toml`, `[tool.flexinspect]` in pyproject.toml, and a per-user file.

The project settings are the nearest file from the current folder upwards. They override the
per-user file `~/.config/flexinspect/config.toml` (in `XDG_CONFIG_HOME` or, on Windows, `APPDATA` if
set). There are five sections: `[models]` (see `flexinspect models --help`), `[keys]`
(docs/interface.md), `[breakpoints]` (docs/breakpoints.md), `[debugging]` with a subsection per
profile (docs/debugger-api.md), and `[figures]` with the language of labels (docs/masks.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from flexinspect.core.environment import read_text, user_folder
from flexinspect.core.errors import UsageError
from flexinspect.core.languages import LANGUAGE_VARIABLE, Labels, languages, load_labels
from flexinspect.core.parsing import parse_toml
from flexinspect.core.text import did_you_mean
from flexinspect.inputs.model_sizes import canonical_dtype


class ModelAlias(Struct, frozen=True):
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


class Config(Struct, frozen=True):
    """The user's settings; `files` are the files that were read, in order of precedence.

    `keys` maps key ids of `flexinspect.core.keyboard` to keys separated by commas, `breakpoints`
    maps names to conditions. `debugging` maps profiles ("" for the section itself) to switches by
    full name. `lang` is the language of figures and reports, None for the default.
    """

    models: Mapping[str, ModelAlias] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    breakpoints: Mapping[str, str] = field(default_factory=dict)
    debugging: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    lang: str | None = None
    files: tuple[Path, ...] = ()


def load_config(start: Path | None = None) -> Config:
    """Read the project settings, searched upwards from `start` (default: cwd), and the user's file.

    Raises `UsageError` with file and line for invalid TOML, unknown sections, wrong types, invalid
    breakpoints, and keys that do not exist or that two actions would share.
    """
    models: dict[str, ModelAlias] = {}
    keys: dict[str, tuple[str, ...]] = {}
    remapped_in: dict[str, _SettingsFile] = {}
    breakpoints: dict[str, str] = {}
    debugging: dict[str, dict[str, bool]] = {}
    lang: str | None = None
    files = []
    sources = [_project_settings(start or Path.cwd())]
    own = user_config_file()
    sources.append(_load_settings(own) if own is not None and own.is_file() else None)
    for source in filter(None, sources):
        files.append(source.file)
        aliases = source.section("models").items()
        models = {alias: _read_model(source, alias, each) for alias, each in aliases} | models
        for action, names in _read_keys(source).items():
            keys.setdefault(action, names)
            remapped_in.setdefault(action, source)
        breakpoints = _read_breakpoints(source) | breakpoints
        for profile, switches in _read_debugging(source).items():
            debugging[profile] = switches | debugging.get(profile, {})
        lang = lang or _read_language(source)
    _check_shared_keys(keys, remapped_in)
    joined = {name: ",".join(keys[name]) for name in keys}
    return Config(models, joined, breakpoints, debugging, lang, tuple(files))


_SECTIONS = {
    "models": ("alias = path", "See `flexinspect models --help` for the form."),
    "keys": (
        '"action" = "key"',
        'For example "step.next" = "w"; the palette of the interface (p) lists every action.',
    ),
    "breakpoints": ('name = "condition"', 'For example unsure = "entropy > 3 and step > 2".'),
    "debugging": ("switches", 'For example, in [debugging]: "memory_usage = true".'),
    "figures": ('lang = "en"', "The only key is lang, the language of figures and reports."),
}
"""What each section is a table of, and the hint for a mistake in it."""


class _SettingsFile(Struct, frozen=True):
    """A file, its text, and the settings in it."""

    file: Path
    text: str
    settings: Any

    def section(self, name: str) -> dict[str, Any]:
        """Return a section, empty if it is missing. Raises `UsageError` unless it is a table."""
        table = self.settings.get(name, {})
        if not isinstance(table, dict):
            raise self.error(name, name, f"[{name}] must be a table of {_SECTIONS[name][0]}")
        return table

    def error(self, section: str, key: str, message: str, hint: str | None = None) -> UsageError:
        """Return an error at the line of a key; the default hint is that of the section."""
        hint = hint or _SECTIONS[section][1]
        return UsageError(f"{self.file}:{self.line_of(key)}: {message}.", hint=hint)

    def line_of(self, key: str) -> int:
        """Return the first line that assigns or opens a key: tomllib keeps no positions."""
        name = re.escape(key)
        pattern = re.compile(
            rf"""^\s*(?:\[+[^\]#]*\b{name}["']?\s*\]|["']?{name}["']?\s*[.=])""", re.MULTILINE
        )
        found = pattern.search(self.text)
        return 1 if found is None else self.text.count("\n", 0, found.end()) + 1


def _project_settings(start: Path) -> _SettingsFile | None:
    for folder in (start.resolve(), *start.resolve().parents):
        file = folder / "flexinspect.toml"
        if file.is_file():
            return _load_settings(file)
        shared = folder / "pyproject.toml"
        # Another project's broken pyproject.toml is not ours to complain about.
        if shared.is_file() and "tool.flexinspect" in read_text(shared, "settings file"):
            source = _load_settings(shared, "tool", "flexinspect")
            if source.settings is not None:
                return source
    return None


def user_config_file() -> Path | None:
    """Return the path of the per-user file (it may not exist), None without a home folder."""
    root = user_folder("XDG_CONFIG_HOME", "APPDATA", ".config")
    return None if root is None else root / "flexinspect" / "config.toml"


def _load_settings(file: Path, *path: str) -> _SettingsFile:
    """Read the table at a path of names in a TOML file, and check the names of its sections."""
    text = read_text(file, "settings file")
    try:
        settings: Any = parse_toml(text)
    except ValueError as error:
        line = re.search(r"at line (\d+)", str(error))
        end = ", at its end" if "end of document" in str(error) else ""
        where = f"{file}:{line[1]}" if line else f"{file}{end}"
        what = re.sub(r" \(at .*\)$", "", str(error))
        hint = "Correct that line."
        raise UsageError(f"{where}: this is not valid TOML ({what}).", hint=hint) from error
    for name in path:
        settings = settings.get(name, {} if name != path[-1] else None)
    source = _SettingsFile(file, text, settings)
    if settings is not None and not isinstance(settings, dict):
        raise source.error("models", "flexinspect", "[tool.flexinspect] must be a table")
    for name in settings or ():
        if name not in _SECTIONS:
            known = [f"[{section}]" for section in _SECTIONS]
            hint = did_you_mean(f"[{name}]", known, f"The sections are {', '.join(known)}.")
            raise source.error("models", name, f"the section {name!r} is unknown", hint)
    return source


def _read_model(source: _SettingsFile, alias: str, value: object) -> ModelAlias:
    entry = {"path": value} if isinstance(value, str) else value
    wrong, hint = "", None
    if not isinstance(entry, dict):
        wrong, entry = "must be a string or a table { path = ... }", {}
    target, dtype = entry.get("path"), entry.get("dtype")
    if unknown := [key for key in entry if key not in ("path", "dtype")]:
        wrong = f"has an unknown key {unknown[0]!r}"
    elif not isinstance(target, str) or not target.strip():
        wrong = wrong or "needs a path: a hub id or a folder"
    elif dtype is not None:
        try:
            dtype = canonical_dtype(str(dtype))
        except UsageError as error:
            wrong, hint = f"has an unknown dtype {dtype!r}", error.hint
    if wrong:
        raise source.error("models", alias, f"the model {alias!r} {wrong}", hint)
    return ModelAlias(alias, str(target).strip(), dtype, source.file)


def _read_keys(source: _SettingsFile) -> dict[str, tuple[str, ...]]:
    """Return the keys of each action as Textual names them."""
    from flexinspect.core.keyboard import KEY_SYNTAX, all_keys, parse_key

    known = {key.id for key in all_keys()}
    found = {}
    for action, value in source.section("keys").items():
        if action not in known:
            hint = did_you_mean(action, known)
            raise source.error("keys", action, f"no action is called {action!r}", hint)
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
            what = f"the action {action!r} needs a key, or a list of keys"
            raise source.error("keys", action, what)
        keys: list[str] = []
        for name in names:
            if (key := parse_key(name)) is None:
                what = f"the action {action!r} has {name!r}, which is not a key"
                raise source.error("keys", action, what, KEY_SYNTAX)
            keys.append(key)
        found[action] = tuple(dict.fromkeys(keys))
    return found


def _check_shared_keys(
    keys: Mapping[str, tuple[str, ...]], sources: Mapping[str, _SettingsFile]
) -> None:
    """Refuse a key that another action uses, unless that action gets another key."""
    from flexinspect.core.keyboard import FIXED_KEYS, find_key_conflict

    conflict = find_key_conflict(keys)
    if conflict is None:
        return
    key, action, other = conflict
    what = f"the action {action!r} has {key!r}, which {other!r} already uses"
    hint = f"Choose another key, or assign another key to {other!r} here as well."
    if FIXED_KEYS.get(other) == key:
        hint = f"{key!r} always belongs to {other!r}; choose another key."
    raise sources[action].error("keys", action, what, hint)


def _read_breakpoints(source: _SettingsFile) -> dict[str, str]:
    table = source.section("breakpoints")
    if not table:
        return {}
    from flexinspect.breakpoints.grammar import ExpressionError
    from flexinspect.breakpoints.store import BreakpointStore

    store = BreakpointStore()
    for name, condition in table.items():
        if not isinstance(condition, str):
            what = f"the breakpoint {name!r} needs a condition in quotes"
            raise source.error("breakpoints", name, what)
        try:
            store.add(condition)
        except ExpressionError as error:
            raise error.with_location(f"{source.file}:{source.line_of(name)}") from None
    return dict(table)


def _read_debugging(source: _SettingsFile) -> dict[str, dict[str, bool]]:
    """Return the switches of each profile; "" is the section itself."""
    from flexinspect.records.debug_switches import parse_switch

    table = source.section("debugging")
    profiles = {name: value for name, value in table.items() if isinstance(value, dict)}
    base = {name: value for name, value in table.items() if name not in profiles}
    found: dict[str, dict[str, bool]] = {}
    for profile, switches in {"": base, **profiles}.items():
        found[profile] = {}
        for name, value in switches.items():
            try:
                switch = parse_switch(name)
            except UsageError as error:
                raise source.error("debugging", name, error.message.rstrip(".")) from None
            if not isinstance(value, bool):
                raise source.error("debugging", name, f"the switch {name!r} must be true or false")
            found[profile][switch] = value
    return found


def _read_language(source: _SettingsFile) -> str | None:
    """Return the language of figures and reports, None if it is not set."""
    table = source.section("figures")
    for name in table:
        if name != "lang":
            raise source.error("figures", name, f"[figures] has no key {name!r}")
    lang = table.get("lang")
    if lang is None:
        return None
    if lang not in languages():
        what = f"there are no labels in {lang!r}; the languages are {', '.join(languages())}"
        raise source.error("figures", "lang", what, 'Write for instance lang = "en".')
    return str(lang)


def figure_labels(flag: str | None = None) -> Labels:
    """Return the labels of figures and reports: of --lang, the environment, or the settings.

    Raises `UsageError` for a language that does not exist.
    """
    is_chosen = flag or os.environ.get(LANGUAGE_VARIABLE)
    return load_labels(flag if is_chosen else load_config().lang)
