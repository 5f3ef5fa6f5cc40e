"""Keys of the settings file are those of Textual, under its names."""

from __future__ import annotations

import string

import pytest
from textual._keyboard_protocol import FUNCTIONAL_KEYS
from textual.keys import KEY_DISPLAY_ALIASES, _character_to_key

from flexinspect.core.keyboard import GROUPS, KEYS, NAMED_KEYS, all_keys, parse_key


def test_every_default_key_is_a_key_under_its_name() -> None:
    names = [name for key in all_keys() for name in key.keys]
    assert [parse_key(name) for name in names] == names


def test_no_two_actions_share_a_default_key() -> None:
    keys = [name for key in KEYS for name in key.keys]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("character", [*string.printable[:95], "日", "é"])
def test_a_character_is_named_as_textual_names_it(character: str) -> None:
    name = _character_to_key(character)
    assert parse_key(character) == name
    assert parse_key(name) == name


def test_the_named_keys_are_known_to_textual_and_may_be_written_as_help_shows_them() -> None:
    assert set(NAMED_KEYS) <= {*FUNCTIONAL_KEYS.values(), "space"}
    for name, display in KEY_DISPLAY_ALIASES.items():
        assert parse_key(display) == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("shift+a", "A"),
        ("Shift+Ctrl+F5", "ctrl+shift+f5"),
        ("ctrl++", "ctrl+plus"),
        ("ctrl+A", "ctrl+a"),
        ("ctrl+i", "tab"),
        ("shift+7", None),
        ("ctrl+", None),
        ("ctrl+ctrl+a", None),
        ("a,b", None),
        ("return", None),
        ("\x1b", None),
        ("", None),
    ],
)
def test_modifiers_stand_in_order_and_what_a_terminal_never_sends_is_no_key(
    written: str, name: str | None
) -> None:
    assert parse_key(written) == name


def test_every_action_has_a_group() -> None:
    assert {key.group for key in all_keys()} == set(GROUPS)
