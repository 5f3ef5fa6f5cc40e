"""What a model name means, and the error when it means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexinspect.core.errors import ModelError
from flexinspect.inputs import model_names
from flexinspect.inputs.config import load_config
from flexinspect.inputs.model_names import ALIASES, count_parameters, resolve


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_its_hub_id_with_a_shipped_architecture(alias: str) -> None:
    source = resolve(alias)
    assert (source.name, source.kind, source.repo_id) == (alias, "alias", ALIASES[alias])
    assert source.where == "download"
    assert source.config_path is not None
    assert source.config_path.is_file()
    assert source.gated == alias.startswith("llama")
    assert source.path is None


def test_a_hub_id_of_a_built_in_model_has_its_architecture_too() -> None:
    source = resolve("Qwen/Qwen3-4B")
    assert source.kind == "hub"
    assert source.config_path is not None


def test_any_other_hub_id_must_be_downloaded() -> None:
    source = resolve("someone/some-model")
    assert (source.kind, source.where, source.config_path) == ("hub", "download", None)


def test_a_local_folder_is_here(tiny_llama: Path) -> None:
    source = resolve(str(tiny_llama))
    assert (source.kind, source.where, source.path) == ("folder", "here", tiny_llama)
    assert count_parameters(source) == 28_832


def test_a_folder_wins_over_a_hub_id_of_the_same_name(home: Path, tiny_llama: Path) -> None:
    (home / "org").mkdir()
    (home / "org" / "name").symlink_to(tiny_llama)
    assert resolve("org/name").kind == "folder"


def test_the_demo_is_found_where_it_is_shipped(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_names, "DEMO", tiny_llama)
    assert resolve("demo").path == tiny_llama
    monkeypatch.setattr(model_names, "DEMO", tiny_llama / "nothing")
    with pytest.raises(ModelError, match="demo model is missing"):
        resolve("demo")


def test_user_aliases_point_to_folders_hub_ids_and_other_aliases(
    home: Path, tiny_llama: Path
) -> None:
    (home / "flexinspect.toml").write_text(
        f'[models]\nlocal = "{tiny_llama}"\nremote = "org/name"\n'
        'short = { path = "qwen3_4b", dtype = "bf16" }\nqwen3_8b = "org/mine"\n'
    )
    config = load_config()
    assert resolve("local", config).path == tiny_llama
    assert resolve("remote", config).repo_id == "org/name"
    short = resolve("short", config)
    assert (short.name, short.repo_id, short.dtype) == ("short", "Qwen/Qwen3-4B", "bfloat16")
    assert short.config_path is not None
    assert resolve("qwen3_8b", config).repo_id == "org/mine"


def test_a_broken_user_alias_is_reported_with_file_and_folder(home: Path) -> None:
    (home / "flexinspect.toml").write_text('[models]\nlost = "runs/a/b"\n')
    with pytest.raises(ModelError) as raised:
        resolve("lost", load_config())
    assert str(home / "flexinspect.toml") in raised.value.message
    assert str(home / "runs" / "a" / "b") in raised.value.sentence()


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("lama3.2_3b_it", "llama3.2_3b_it"), ("Qwen3-4B", "qwen3_4b"), ("demmo", "demo")],
)
def test_an_unknown_name_suggests_the_nearest_ones(typo: str, meant: str) -> None:
    with pytest.raises(ModelError) as raised:
        resolve(typo)
    assert raised.value.message == f"The model {typo!r} is unknown."
    assert meant in str(raised.value.hint)
    assert "flexinspect models" in str(raised.value.hint)
    assert raised.value.exit_code == 2


def test_user_aliases_are_among_the_suggestions(home: Path) -> None:
    (home / "flexinspect.toml").write_text('[models]\nmy_finetune = "org/name"\n')
    with pytest.raises(ModelError) as raised:
        resolve("my_finetun", load_config())
    assert "my_finetune" in str(raised.value.hint)


@pytest.mark.parametrize(
    "name", ["./nothing", "/no/where/at/all", "~/nothing-here", "~nobody-at-all/x", "a/b/c"]
)
def test_a_missing_folder_is_reported(home: Path, name: str) -> None:
    with pytest.raises(ModelError, match="There is no model folder"):
        resolve(name)


def test_a_folder_without_a_configuration_is_not_a_model(home: Path) -> None:
    (home / "stuff").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve("./stuff")
