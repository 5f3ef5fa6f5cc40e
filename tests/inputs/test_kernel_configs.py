"""The table of kernel configurations: the built-in one, a user's TOML, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexinspect.core.errors import UsageError
from flexinspect.inputs.kernel_configs import (
    BUILT_IN,
    check_config,
    choose_configs,
    config_from,
    read_table,
)

TABLE = """
[[config]]
name = "mine"
mask = "window:16"
q_heads = 4
kv_heads = 2

[[kernel]]
name = "mine"
function = "my_kernel:attention"
previous = ["previous.v1:attention"]
"""


def test_the_built_in_configurations_are_valid_and_have_names_of_their_own() -> None:
    for config in BUILT_IN:
        check_config(config)
    assert len({config.name for config in BUILT_IN}) == len(BUILT_IN)


def test_a_table_comes_before_the_built_in_one_and_has_kernels(tmp_path: Path) -> None:
    file = tmp_path / "kernels.toml"
    file.write_text(TABLE, "utf-8")
    table = read_table(file)
    assert table.config[0].name == "mine"
    assert len(table.config) == len(BUILT_IN) + 1
    assert table.kernel[0].previous == ("previous.v1:attention",)
    assert choose_configs(table, ["mine", "mine"]) == (table.config[0],)
    assert choose_configs(table, ["all"]) == table.config


def test_a_name_of_the_built_in_table_can_be_redefined(tmp_path: Path) -> None:
    file = tmp_path / "kernels.toml"
    file.write_text('[[config]]\nname = "causal-float32"\nhead_dim = 32\n', "utf-8")
    (config,) = choose_configs(read_table(file), ["causal-float32"])
    assert config.head_dim == 32
    assert len(read_table(file).config) == len(BUILT_IN)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[[config]\n", "is not a table of kernels"),
        ("[[config]]\nmask = 'causal'\n", "missing required field `name`"),
        ("[[config]]\nname = 'a'\nheads = 3\n", "unknown field `heads`"),
        ("[[config]]\nname = 'a'\n[[config]]\nname = 'a'\n", "two entries of the configuration a"),
        ("[[kernel]]\nname = 'a'\nfunction = 3\n", "Expected `str`"),
    ],
)
def test_a_wrong_table_gets_a_sentence(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "kernels.toml"
    file.write_text(text, "utf-8")
    with pytest.raises(UsageError) as caught:
        read_table(file)
    assert part in caught.value.message
    assert str(file) in caught.value.message


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"q_heads": 3, "kv_heads": 2}, "not a multiple of its 2 key heads"),
        ({"dtype": "float8"}, "the dtype float8"),
        ({"q_len": 0}, "q_len = 0"),
        ({"mask": "window"}, "window takes a whole number"),
        ({"mask": "causal:3"}, "causal takes no number"),
        ({"mask": "diagonal"}, "the mask diagonal"),
        ({"score_mod": "rope"}, "the score_mod rope"),
        ({"softcap": 0.0}, "softcap = 0"),
        ({"q_len": 1 << 15, "kv_len": 1 << 15}, "larger than the oracle can hold"),
        ({"head_dim": "64"}, "Expected `int`"),
    ],
)
def test_an_impossible_configuration_gets_a_sentence(fields: dict[str, object], part: str) -> None:
    with pytest.raises(UsageError, match=r".") as caught:
        config_from(fields)
    assert part in caught.value.message


def test_an_unknown_configuration_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(UsageError) as caught:
        choose_configs(read_table(None), ["causal-float31"])
    assert caught.value.hint == "Did you mean causal-float32?"
