"""Hooks of the program: named and taken into the reference, unless they leave out batch rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.audits import Audit
from support.tiny import ids, make_model
from torch import Tensor, nn

from flexinspect.rules.numerics.audit_findings import HOOK, HOOK_ROWS, UNEXPLAINED

ADDED = torch.linspace(-2, 2, 48)


def adds_to_the_last_row_in_place(module: nn.Module, args: Any, output: Any) -> Any:
    output[..., -1, :] += ADDED
    return output


def adds_to_all_rows(module: nn.Module, args: Any, output: Any) -> Any:
    return output + ADDED


def changes_prompts_only(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 1.5 if output.shape[1] > 1 else None


def removes_a_direction(module: nn.Module, args: Any, output: Any) -> Any:
    unit = ADDED / ADDED.norm()
    return output - (output @ unit)[..., None] * unit


def adds_to_the_first_of_a_tuple(module: nn.Module, args: Any, output: Any) -> Any:
    return (output[0] + ADDED, *output[1:])


def adds_to_the_input(module: nn.Module, args: Any) -> Any:
    return (args[0] + ADDED, *args[1:])


def adds_to_the_input_in_place(module: nn.Module, args: Any) -> None:
    args[0].add_(ADDED)


def adds_to_the_keyword(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, kwargs | {"hidden_states": kwargs["hidden_states"] + ADDED}


DOWN, UP = (
    torch.linspace(-1, 1, 4 * 96).view(96, 4).sin(),
    torch.linspace(-1, 2, 4 * 48).view(4, 48),
)


def adds_an_adapter(module: nn.Module, args: Any, output: Any) -> Any:
    return output + args[0] @ DOWN @ UP


def raises_logits(module: nn.Module, args: Any, output: Any) -> Any:
    output[..., -1, 7] += 40
    return output


def silences_head_1(module: nn.Module, args: Any, output: Any) -> Any:
    output[..., 12:24] = 0
    return output


def changes_row_0_in_place(module: nn.Module, args: Any, output: Any) -> Any:
    hidden = output[0]
    hidden[..., -1, :] += ADDED
    return output


def changes_row_0(module: nn.Module, args: Any, output: Any) -> Any:
    changed = output.clone()
    changed[0] += ADDED
    return changed


def changes_the_last_row_of_the_batch(module: nn.Module, args: Any, output: Any) -> Any:
    output[-1] += ADDED
    return output


def changes_nothing(module: nn.Module, args: Any, output: Any) -> None:
    output.mean()


def adds_zeros(module: nn.Module, args: Any, output: Any) -> Any:
    return output + 0 * ADDED


Hook = Callable[..., Any]


def run(
    audit: Audit, name: str, hook: Hook, *, n_batch: int = 3, model: Any = None, n_pads: int = 0
) -> Any:
    """Decode with a hook on one module, which is removed before the audit."""
    model = model or make_model("llama")
    module = model.get_submodule(name)
    rows = torch.tensor([ids(12, seed) for seed in range(3, 3 + n_batch)])
    mask = torch.ones_like(rows)
    rows[1:, :n_pads], mask[1:, :n_pads] = 0, 0

    def program() -> None:
        if hook is adds_to_the_keyword:
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        elif hook.__name__.startswith("adds_to_the_input"):
            handle = module.register_forward_pre_hook(hook)
        else:
            handle = module.register_forward_hook(hook)
        model.generate(rows, attention_mask=mask, max_new_tokens=4, do_sample=False)
        handle.remove()

    return audit(model, program)


MEANT = [
    ("model.layers.1", adds_to_the_last_row_in_place),
    ("model.layers.1", adds_to_all_rows),
    ("model.layers.1", changes_prompts_only),
    ("model.layers.0.mlp", removes_a_direction),
    ("model.layers.1.mlp", adds_to_the_last_row_in_place),
    ("model.layers.1.self_attn", adds_to_the_first_of_a_tuple),
    ("model.layers.1.self_attn", adds_to_the_keyword),
    ("model.layers.1", adds_to_the_input),
    ("model.layers.1", adds_to_the_input_in_place),
    ("model.layers.1.self_attn.o_proj", adds_to_the_input),
    ("model.layers.1.self_attn.q_proj", adds_to_all_rows),
    ("model.embed_tokens", adds_to_all_rows),
    ("model.norm", adds_to_all_rows),
    ("model.layers.1.mlp.down_proj", adds_an_adapter),
    ("lm_head", raises_logits),
]


@pytest.mark.parametrize(("name", "hook"), MEANT)
def test_a_hook_that_changes_all_batch_rows_is_a_note_and_what_follows_is_judged(
    audit: Audit, name: str, hook: Hook
) -> None:
    verdicts, findings, _ = run(audit, name, hook)
    assert [one.id for one in findings] == [HOOK], [one.sentence for one in findings]
    assert f"{hook.__name__} at test_program_hooks.py:" in findings[0].sentence
    assert f" on {name} changes its " in findings[0].sentence
    assert "of all 3 batch rows" in findings[0].sentence
    assert [(one.n_steps, one.divergence) for one in verdicts] == [(4, None)] * 3


@pytest.mark.parametrize("n_pads", [0, 4])
@pytest.mark.parametrize("hook", [adds_to_the_last_row_in_place, adds_to_all_rows])
def test_a_single_sequence_and_a_padded_batch_are_judged_with_the_hook(
    audit: Audit, hook: Hook, n_pads: int
) -> None:
    n_batch = 2 if n_pads else 1
    verdicts, (found,), _ = run(audit, "model.layers.1", hook, n_batch=n_batch, n_pads=n_pads)
    assert found.id == HOOK
    assert [one.divergence for one in verdicts] == [None] * n_batch


@pytest.mark.parametrize(
    ("hook", "rows", "others"),
    [
        (changes_row_0_in_place, "batch row 0", "the batch rows 1, 2"),
        (changes_row_0, "batch row 0", "the batch rows 1, 2"),
        (changes_the_last_row_of_the_batch, "batch row 2", "the batch rows 0, 1"),
    ],
)
def test_a_hook_that_leaves_out_batch_rows_is_a_warning(
    audit: Audit, hook: Hook, rows: str, others: str
) -> None:
    _, (found,), _ = run(audit, "model.layers.1", hook)
    assert found.id == HOOK_ROWS
    assert f"changes only {rows} of 3 in its output" in found.sentence
    assert f"It leaves {others} exactly as given" in found.sentence
    assert ("whose [0] is batch row 0" in found.sentence) == (rows == "batch row 0")


def test_what_a_hook_makes_of_the_first_quantity_is_described(audit: Audit) -> None:
    _, (found,), _ = run(audit, "model.layers.1.self_attn.q_proj", silences_head_1, n_batch=1)
    assert "Through it the query of layer 1 differs only in head 1 of 4" in found.sentence


@pytest.mark.parametrize("hook", [changes_nothing, adds_zeros])
def test_a_hook_that_changes_nothing_is_not_mentioned(audit: Audit, hook: Hook) -> None:
    verdicts, findings, _ = run(audit, "model.layers.1", hook)
    assert not findings
    assert [one.divergence for one in verdicts] == [None] * 3


def test_a_fault_after_the_hook_is_found_beside_it(audit: Audit) -> None:
    model = make_model("llama")
    model.model.layers[2].mlp.act_fn = nn.ELU()
    _, findings, _ = run(audit, "model.layers.0", adds_to_all_rows, model=model, n_batch=1)
    assert [one.id for one in findings] == [HOOK, UNEXPLAINED]
    assert findings[1].layer == 2


def test_a_fault_before_the_hook_is_not_taken_for_it(audit: Audit) -> None:
    model = make_model("llama")
    model.model.layers[0].mlp.act_fn = nn.ELU()
    _, (found,), _ = run(audit, "model.layers.2", changes_nothing, model=model, n_batch=1)
    assert (found.id, found.layer) == (UNEXPLAINED, 0)


def test_a_hook_with_random_numbers_is_not_reproduced(audit: Audit) -> None:
    def adds_noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + torch.randn_like(output)

    _, (found,), _ = run(audit, "model.layers.1", adds_noise, n_batch=1)
    assert found.id == UNEXPLAINED


def test_a_hook_is_called_with_the_dtype_of_the_program(audit: Audit) -> None:
    def projects(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        unit = (ADDED / ADDED.norm()).bfloat16()
        return output - 2 * (output @ unit)[..., None] * unit

    model = make_model("llama").bfloat16()
    verdicts, (found,), _ = run(audit, "model.layers.1", projects, model=model)
    assert found.id == HOOK
    assert [one.divergence for one in verdicts] == [None] * 3
