"""The user's settings are found, joined and, when wrong, reported with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paths import DOCS

from flexinspect.core.errors import UsageError
from flexinspect.inputs.config import figure_labels, load_config


def test_without_any_file_there_are_no_settings(home: Path) -> None:
    config = load_config()
    assert config.models == {}
    assert config.files == ()


def test_the_nearest_file_upwards_is_read(home: Path) -> None:
    (home / "flexinspect.toml").write_text('[models]\nmine = "org/name"\n')
    below = home / "a" / "b"
    below.mkdir(parents=True)
    config = load_config(below)
    assert config.models["mine"].target == "org/name"
    assert config.files == (home / "flexinspect.toml",)


def test_a_nearer_file_hides_a_farther_one(home: Path) -> None:
    (home / "flexinspect.toml").write_text('[models]\nmine = "org/far"\n')
    below = home / "a"
    below.mkdir()
    (below / "pyproject.toml").write_text('[tool.flexinspect.models]\nmine = "org/near"\n')
    assert load_config(below).models["mine"].target == "org/near"


def test_flexinspect_toml_wins_over_pyproject_in_the_same_folder(home: Path) -> None:
    (home / "flexinspect.toml").write_text('[models]\nmine = "org/own"\n')
    (home / "pyproject.toml").write_text('[tool.flexinspect.models]\nmine = "org/shared"\n')
    assert load_config().models["mine"].target == "org/own"


def test_a_pyproject_without_our_section_is_ignored_even_when_broken(home: Path) -> None:
    (home / "flexinspect.toml").write_text('[models]\nmine = "org/name"\n')
    below = home / "a"
    below.mkdir()
    (below / "pyproject.toml").write_text("[project\n")
    assert "mine" in load_config(below).models


def test_the_per_user_file_adds_settings_that_the_project_lacks(home: Path) -> None:
    per_user = home.parent / "xdg" / "flexinspect" / "config.toml"
    per_user.parent.mkdir(parents=True)
    per_user.write_text('[models]\nmine = "org/user"\nother = "org/other"\n')
    (home / "flexinspect.toml").write_text('[models]\nmine = "org/project"\n')
    config = load_config()
    assert config.models["mine"].target == "org/project"
    assert config.models["other"].target == "org/other"
    assert config.files == (home / "flexinspect.toml", per_user)


def test_a_table_sets_path_and_dtype(home: Path) -> None:
    (home / "flexinspect.toml").write_text('[models]\nbig = { path = "x/y", dtype = "bf16" }\n')
    assert load_config().models["big"].dtype == "bfloat16"


def test_a_folder_is_relative_to_the_file(home: Path) -> None:
    (home / "flexinspect.toml").write_text('[models]\nlocal = "runs/7"\n')
    below = home / "a"
    below.mkdir()
    assert load_config(below).models["local"].folder == home / "runs" / "7"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('[models]\na = "x/y"\nb = = 3\n', 3, "not valid TOML"),
        ("[models]\n\nmine = 7\n", 3, "'mine' must be a string or a table"),
        ('[models]\nmine = { dtype = "bf16" }\n', 2, "needs a path"),
        ('[models]\nmine = { path = "x/y", dtype = "int4" }\n', 2, "unknown dtype 'int4'"),
        ('[models]\n"a.b" = { path = "x/y", device = "cpu" }\n', 2, "unknown key 'device'"),
        ("models = 3\n", 1, "[models] must be a table"),
        ('\n[model]\nmine = "x/y"\n', 2, "the section 'model' is unknown"),
        ("[colours]\n", 1, "the section 'colours' is unknown"),
    ],
)
def test_a_mistake_is_named_with_file_and_line(
    home: Path, text: str, line: int, message: str
) -> None:
    file = home / "flexinspect.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        load_config()
    assert raised.value.message.startswith(f"{file}:{line}: ")
    assert message in raised.value.message
    assert raised.value.exit_code == 2


def test_an_unknown_section_or_action_has_the_nearest_name_as_hint(home: Path) -> None:
    hints = {
        "[model]": "Did you mean [models]?",
        "[colours]": "The sections are [models], [keys], [breakpoints], [debugging], [figures].",
        '[keys]\n"step.nxt" = "w"': "Did you mean step.next?",
    }
    for text, hint in hints.items():
        (home / "flexinspect.toml").write_text(text)
        with pytest.raises(UsageError) as raised:
            load_config()
        assert raised.value.hint == hint


def test_a_file_that_is_not_text_is_refused(home: Path) -> None:
    (home / "flexinspect.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_config()


def test_keys_of_the_interface_are_remapped_by_action(home: Path) -> None:
    page = (DOCS / "interface.md").read_text()
    example = page.split("```toml\n")[1].split("```")[0]
    (home / "flexinspect.toml").write_text(example)
    assert load_config().keys == {"step.next": "w", "step.previous": "u,left"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"step.nxt" = "w"', "no action is called 'step.nxt'."),
        ('"step.next" = 3', "the action 'step.next' needs a key, or a list of keys."),
        ('"step.next" = []', "the action 'step.next' needs a key, or a list of keys."),
        ('"step.next" = "spcae"', "the action 'step.next' has 'spcae', which is not a key."),
        ('"step.next" = ["w", ""]', "the action 'step.next' has '', which is not a key."),
        ('"step.next" = "strg+a"', "the action 'step.next' has 'strg+a', which is not a key."),
        (
            '"step.next" = "n"',
            "the action 'step.next' has 'n', which 'finding.next' already uses.",
        ),
        (
            '"step.next" = "ctrl+q"',
            "the action 'step.next' has 'ctrl+q', which 'app.quit' already uses.",
        ),
    ],
)
def test_a_wrong_key_is_named_with_file_and_line(home: Path, line: str, message: str) -> None:
    file = home / "flexinspect.toml"
    file.write_text(f"[keys]\n{line}\n")
    with pytest.raises(UsageError) as caught:
        load_config()
    assert caught.value.message == f"{file}:2: {message}"
    assert caught.value.hint


def test_keys_may_be_written_as_on_the_keyboard_or_in_the_help(home: Path) -> None:
    (home / "flexinspect.toml").write_text(
        '[keys]\n"step.next" = ["!", "Ctrl + A", "shift+v", "w"]\n'
        '"step.last" = ["pgdn", "~", "ctrl++"]\n"step.ten_forward" = "SPACE"\n'
        '"run.pause" = "u"\n'
        '"step.previous" = ["←", "shift+alt+left"]\n'
    )
    assert load_config().keys == {
        "step.next": "exclamation_mark,ctrl+a,V,w",
        "step.last": "pagedown,tilde,ctrl+plus",
        "step.ten_forward": "space",
        "run.pause": "u",
        "step.previous": "left,alt+shift+left",
    }


def test_a_key_can_move_from_an_action_that_gets_another_key(home: Path) -> None:
    (home / "flexinspect.toml").write_text('[keys]\n"step.next" = "n"\n"finding.next" = "w"\n')
    assert load_config().keys == {"step.next": "n", "finding.next": "w"}
    (home / "flexinspect.toml").write_text(
        '[keys]\n"step.next" = ["left", "h"]\n"step.previous" = ["right", "l"]\n'
    )
    assert load_config().keys["step.next"] == "left,h"


def test_a_key_conflict_between_two_files_names_the_file_of_the_new_key(home: Path) -> None:
    per_user = home.parent / "xdg" / "flexinspect" / "config.toml"
    per_user.parent.mkdir(parents=True)
    per_user.write_text('[keys]\n"app.help" = "w"\n')
    (home / "flexinspect.toml").write_text('[keys]\n"step.next" = "w"\n')
    with pytest.raises(
        UsageError, match=r"'step.next' has 'w', which 'app.help' already uses"
    ) as caught:
        load_config()
    assert caught.value.message.startswith(f"{home / 'flexinspect.toml'}:2: ")


def test_a_key_of_textual_itself_cannot_be_remapped(home: Path) -> None:
    (home / "flexinspect.toml").write_text('[keys]\n"app.quit" = "Q"\n"step.next" = "ctrl+q"\n')
    with pytest.raises(UsageError) as caught:
        load_config()
    assert caught.value.hint == "'ctrl+q' always belongs to 'app.quit'; choose another key."


# -- breakpoints -------------------------------------------------------------------------------


def test_breakpoints_of_the_project_override_those_of_the_user_by_name(home: Path) -> None:
    own = home.parent / "xdg" / "flexinspect" / "config.toml"
    own.parent.mkdir(parents=True)
    own.write_text('[breakpoints]\nunsure = "entropy > 2"\nnonfinite = "nan or inf"\n')
    (home / "flexinspect.toml").write_text('[breakpoints]\nunsure = "entropy > 3 [once]"\n')
    assert load_config().breakpoints == {"unsure": "entropy > 3 [once]", "nonfinite": "nan or inf"}


def test_an_invalid_breakpoint_is_reported_with_file_line_and_column(home: Path) -> None:
    (home / "flexinspect.toml").write_text('[breakpoints]\n\nunsure = "entropi > 3"\n')
    with pytest.raises(UsageError) as caught:
        load_config()
    first, shown, mark = caught.value.message.splitlines()
    assert first.endswith("flexinspect.toml:3: entropi is not a known name.")
    assert (shown, mark) == ("  entropi > 3", "  ^^^^^^^")
    assert caught.value.hint == "Did you mean entropy?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[breakpoints]\nunsure = 3\n", ":2: the breakpoint 'unsure' needs a condition in quotes"),
        ('breakpoints = "nan"\n', ":1: [breakpoints] must be a table"),
    ],
)
def test_breakpoints_of_another_form_are_refused(home: Path, text: str, message: str) -> None:
    (home / "flexinspect.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config()
    assert message in caught.value.message
    assert "entropy > 3" in (caught.value.hint or "")


def test_the_language_of_figures_is_that_of_the_flag_the_environment_or_the_settings(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLEXINSPECT_LANG", raising=False)
    assert figure_labels().language == "en"
    (home / "flexinspect.toml").write_text('[figures]\nlang = "zh"\n')
    assert figure_labels().language == "zh"
    monkeypatch.setenv("FLEXINSPECT_LANG", "en")
    assert figure_labels().language == "en"
    assert figure_labels("zh").language == "zh"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[figures]\nlang = "xx"', "flexinspect.toml:2: there are no labels in 'xx'"),
        ("[figures]\nlang = 3", "flexinspect.toml:2: there are no labels in 3"),
        ('[figures]\nlanguage = "zh"', r"flexinspect.toml:2: \[figures\] has no key 'language'"),
    ],
)
def test_a_language_that_does_not_exist_is_refused_with_its_line(
    home: Path, text: str, message: str
) -> None:
    (home / "flexinspect.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_config()
