"""The section [debugging] of the settings sets the switches of the training debuggers."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexinspect.core.errors import UsageError
from flexinspect.inputs.config import load_config


def test_debug_functions_are_set_by_full_and_by_short_name(home: Path) -> None:
    (home / "flexinspect.toml").write_text(
        "[debugging]\ndebug_memory_usage = true\ngradient_norms = true\nvalidation = false\n"
    )
    assert load_config().debugging[""] == {
        "debug_memory_usage": True,
        "debug_gradient_norms": True,
        "debug_validation": False,
    }


def test_a_profile_has_its_own_switches(home: Path) -> None:
    (home / "flexinspect.toml").write_text(
        "[debugging]\nvalidation = true\n[debugging.production]\nmemory_usage = true\n"
    )
    assert load_config().debugging == {
        "": {"debug_validation": True},
        "production": {"debug_memory_usage": True},
    }


def test_the_projects_switch_wins_over_the_users(home: Path) -> None:
    per_user = home.parent / "xdg" / "flexinspect" / "config.toml"
    per_user.parent.mkdir(parents=True)
    per_user.write_text("[debugging]\nvalidation = true\ndata_loading = true\n")
    (home / "flexinspect.toml").write_text("[debugging]\nvalidation = false\n")
    assert load_config().debugging[""] == {
        "debug_validation": False,
        "debug_data_loading": True,
    }


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[debugging]\n\nspeed = true\n", 3, "No switch is called 'speed'; the switches are "),
        ("[debugging]\nvalidation = 1\n", 2, "the switch 'validation' must be true or false"),
        ("debugging = true\n", 1, "must be a table of switches"),
        ("[debugging.test]\nspeed = true\n", 2, "No switch is called 'speed'"),
    ],
)
def test_an_error_is_reported_with_file_and_line(
    home: Path, text: str, line: int, message: str
) -> None:
    (home / "flexinspect.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config()
    assert f"flexinspect.toml:{line}: " in caught.value.message
    assert message in caught.value.message
