"""Parameter counts, memory and safetensors headers, without torch and exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexinspect.core.errors import ModelError, UsageError
from flexinspect.inputs.model_names import ALIASES, ARCHITECTURES
from flexinspect.inputs.model_sizes import (
    MemoryPlan,
    canonical_dtype,
    human_bytes,
    human_count,
    kv_bytes_per_token,
    parameter_count,
    plan_memory,
    read_header,
    stored_parameter_count,
    weight_files,
)

PUBLISHED = {
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_1b_it": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "llama3.2_3b_it": 3_212_749_824,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_8b_it": 8_030_261_248,
    "qwen2.5_3b_it": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_7b_it": 7_615_616_512,
    "qwen2.5_14b_it": 14_770_033_664,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
}


def architecture(alias: str) -> dict[str, Any]:
    config = json.loads((ARCHITECTURES / f"{alias}.json").read_text())
    assert isinstance(config, dict)
    return config


def test_every_alias_ships_its_architecture() -> None:
    assert {file.stem for file in ARCHITECTURES.glob("*.json")} == set(ALIASES) == set(PUBLISHED)


@pytest.mark.parametrize("alias", PUBLISHED)
def test_the_count_is_the_published_one(alias: str) -> None:
    assert parameter_count(architecture(alias)) == PUBLISHED[alias]


@pytest.mark.parametrize("alias", PUBLISHED)
def test_the_count_equals_that_of_the_transformers_model(alias: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    from flexinspect_hooks.loading.random_weights import count_on_meta

    text = (ARCHITECTURES / f"{alias}.json").read_text()
    (tmp_path / "config.json").write_text(text)
    config = AutoConfig.from_pretrained(tmp_path)
    assert count_on_meta(config) == PUBLISHED[alias]
    assert str(config.dtype) == "torch.bfloat16"


@pytest.mark.parametrize("alias", PUBLISHED)
def test_rotary_parameters_survive_the_way_they_are_stored(alias: str) -> None:
    from transformers import AutoConfig

    stored = architecture(alias)
    config = AutoConfig.for_model(stored.pop("model_type"), **stored)
    rope = config.rope_parameters
    assert rope["rope_theta"] == (500_000.0 if alias.startswith("llama") else 1_000_000.0)
    if alias.startswith("llama"):
        assert rope["rope_type"] == "llama3"
        assert rope["factor"] == (8.0 if "3.1" in alias else 32.0)
        assert rope["original_max_position_embeddings"] == 8192


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 16},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "attention_bias": True, "head_dim": 16},
        {"model_type": "qwen3"},
        {"model_type": "mistral", "head_dim": 16},
    ],
)
def test_the_formula_is_exact_for_variants(changes: dict[str, Any]) -> None:
    from transformers import AutoConfig

    from flexinspect_hooks.loading.random_weights import count_on_meta

    config = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        **changes,
    }
    kind = config["model_type"]
    rest = {key: value for key, value in config.items() if key != "model_type"}
    assert parameter_count(config) == count_on_meta(AutoConfig.for_model(kind, **rest))


def test_an_architecture_without_a_formula_has_no_count() -> None:
    assert parameter_count({"model_type": "gpt_neox", "hidden_size": 8}) is None


def test_the_count_of_a_folder_comes_from_its_headers(tiny_llama: Path) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    assert len(weight_files(tiny_llama)) > 1
    assert stored_parameter_count(tiny_llama) == parameter_count(config)


def test_a_token_of_llama_3b_takes_112_kib_of_cache_in_bfloat16() -> None:
    assert kv_bytes_per_token(architecture("llama3.2_3b"), "bfloat16") == 2 * 28 * 8 * 128 * 2
    assert kv_bytes_per_token({"model_type": "odd"}, "float32") is None


def test_the_plan_adds_weights_and_cache() -> None:
    plan = plan_memory(architecture("llama3.2_1b"), dtype="bf16", n_tokens=10, available=10**12)
    assert plan.weights == 2 * PUBLISHED["llama3.2_1b"]
    assert plan.kv == 10 * 2 * 16 * 8 * 64 * 2
    assert plan.total == plan.weights + plan.kv
    assert plan.fits


def test_an_unknown_size_always_fits() -> None:
    assert MemoryPlan(None, None, 0, 5).fits
    assert MemoryPlan(10, None, 0, None).fits
    assert not MemoryPlan(10, None, 0, 5).fits


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:5],
        lambda data: data[:-1],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"not json" + data[16:],
        lambda data: data[:8].replace(data[:8], (2).to_bytes(8, "little")) + b"[]",
        lambda data: b"",
    ],
)
def test_a_damaged_weight_file_is_a_model_error(
    tiny_llama: Path, tmp_path: Path, damage: Any
) -> None:
    whole = weight_files(tiny_llama)[0]
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(whole.read_bytes()))
    with pytest.raises(ModelError, match="is damaged or not a safetensors file"):
        read_header(file)


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(tmp_path) == (tmp_path / "elsewhere.safetensors",)


def test_dtype_names_have_short_forms() -> None:
    assert [canonical_dtype(n) for n in ("fp32", "bf16", "torch.float16")] == [
        "float32",
        "bfloat16",
        "float16",
    ]
    with pytest.raises(UsageError, match="int4"):
        canonical_dtype("int4")


def test_sizes_are_readable() -> None:
    assert [human_bytes(n) for n in (None, 12, 6_425_499_648)] == ["?", "12 B", "6.4 GB"]
    assert [human_count(n) for n in (None, 900, 2_100_000, 3_212_749_824)] == [
        "?",
        "900",
        "2.1 M",
        "3.2 B",
    ]


@pytest.mark.parametrize("value", [None, "many", 0, [1], float("inf")])
def test_a_configuration_with_odd_sizes_has_no_known_size(value: object) -> None:
    config = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": value}
    assert parameter_count(config) is None
    assert kv_bytes_per_token({**config, "num_hidden_layers": 2}, "float32") is None
    assert kv_bytes_per_token({"text_config": value}, "float32") is None
