"""Selectors of modules are read, and match by name, class and dtype."""

from __future__ import annotations

import pytest

from flexinspect.core.errors import UsageError
from flexinspect.inputs.module_selectors import ModuleSelector, parse_selector


def test_a_selector_has_up_to_three_parts() -> None:
    text = "module=mlp.* op=Linear dtype=bf16"
    assert parse_selector(text) == ModuleSelector(text, "mlp.*", "Linear", "bfloat16")
    assert parse_selector("lm_head") == ModuleSelector("lm_head", "lm_head")
    assert parse_selector("dtype=torch.float32").dtype == "float32"


@pytest.mark.parametrize(
    ("text", "name", "kind", "expected"),
    [
        ("mlp.*", "model.layers.3.mlp.up_proj", "Linear", True),
        ("layers.*", "model.layers.3.mlp.up_proj", "Linear", False),
        ("layers.** op=*Norm", "model.layers.3.input_layernorm", "LlamaRMSNorm", True),
        ("op=*Norm", "model.layers.3.mlp", "LlamaMLP", False),
        ("module=layers.[0-2].mlp", "model.layers.3.mlp", "LlamaMLP", False),
        ("dtype=int64", "model.layers.3.mlp", "LlamaMLP", True),
    ],
)
def test_a_module_must_match_all_parts(text: str, name: str, kind: str, expected: bool) -> None:
    assert parse_selector(text).matches(name, kind) is expected


def test_a_dtype_is_that_of_torch_and_none_matches_all() -> None:
    assert parse_selector("dtype=half").matches_dtype("torch.float16")
    assert not parse_selector("dtype=half").matches_dtype("torch.float32")
    assert parse_selector("x").matches_dtype("torch.float8_e5m2")


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("", "selects nothing", "for instance"),
        ("dtype=flot16", "'flot16' is not a dtype", "float16?"),
        ("modul=x", "there is no key 'modul'", "module?"),
        ("op=a op=b", "op occurs twice", "for instance"),
        ("a b", "module occurs twice", "for instance"),
        ("op=", "op has no value", "for instance"),
        ("dtype=\x1b[2J", "'\\x1b[2j' is not a dtype", "float64"),
    ],
)
def test_a_wrong_selector_is_one_sentence(text: str, says: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_selector(text)
    assert says.lower() in caught.value.message.lower()
    assert hint in str(caught.value.hint)
