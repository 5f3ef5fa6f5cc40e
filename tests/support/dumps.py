"""Dumps of other tools: those in tests/fixtures/dumps, fresh ones, and described folders."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.paths import TESTS

DUMPS = TESTS / "fixtures" / "dumps"
PROMPT, CHOSEN = [1, 35, 9, 62, 17], [40, 8, 22]  # of tools/import_fixtures.py
LAYERS = 2


def unpack_dump(name: str, folder: Path) -> Path:
    """Unpack a dump of the fixtures into a folder, and return that."""
    with zipfile.ZipFile(DUMPS / f"{name}.zip") as archive:
        archive.extractall(folder)
    return folder


def write_debug_tree(
    folder: Path, prompt: Sequence[int], *, use_repr: bool, attention: str = "sdpa", **inputs: Any
) -> dict[str, Any]:
    """Run a tiny Llama under transformers' debugger. Returns its logits and layer outputs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.model_debugging_utils import model_addition_debugger_context

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=64,
        initializer_range=0.6,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.tensor([list(prompt)])
    with model_addition_debugger_context(
        model, debug_path=str(folder), do_prune_layers=False, use_repr=use_repr
    ):
        model.forward(input_ids=ids, **inputs)
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, **inputs)
    torch.set_printoptions(profile="default", sci_mode=False)  # the debugger changes them
    # The last of `hidden_states` is after the final norm.
    hidden = [state[0].numpy() for state in out.hidden_states[1:-1]]
    return {"logits": out.logits[0, -1].numpy(), "hidden": hidden}
