"""Dumps of other tools: those in tests/fixtures/dumps, fresh ones, and described folders."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

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


def save_safetensors(file: Path, tensors: dict[str, Any]) -> None:
    """Write numpy arrays to a safetensors file; ("BF16", uint16 array) is a bfloat16."""
    names = {"b": "BOOL", "f4": "F32", "f8": "F64", "f2": "F16", "i8": "I64", "u2": "U16"}
    header, data = {}, b""
    for name, value in tensors.items():
        dtype, array = value if isinstance(value, tuple) else (None, value)
        array = np.ascontiguousarray(array)
        kind = dtype or names["b" if array.dtype == np.bool_ else array.dtype.str[1:]]
        stop = len(data) + array.nbytes
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [len(data), stop],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def attention_step(
    seed: int, keys: dict[str, Any], rows: int, *, layer: int = 0, heads: int = 2
) -> dict[str, Any]:
    """Return random q, k, v with the output and LSE of causal attention after earlier `keys`.

    `keys` holds k and v of earlier steps, and gets those of this one.
    """
    random = np.random.default_rng(seed)
    q = random.standard_normal((heads, rows, 4)).astype(np.float32)
    k, v = random.standard_normal((2, 1, rows, 4)).astype(np.float32)
    for name, new in (("k", k), ("v", v)):
        keys[name] = np.concatenate([keys[name], new], 1) if name in keys else new
    n_keys = keys["k"].shape[1]
    mask = np.tri(n_keys, dtype=np.bool_)[n_keys - rows :]
    scores = np.where(mask, q @ keys["k"].transpose(0, 2, 1) * 0.5, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    out = np.exp(scores - lse[..., None]) @ keys["v"]
    found = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "mask": mask}
    return {f"layers.{layer}.{name}": array for name, array in found.items()}


def described_folder(folder: Path, **changes: Any) -> Path:
    """Write a described folder of one layer: a prompt of 4 tokens, and a step of one row."""
    folder.mkdir(parents=True, exist_ok=True)
    keys: dict[str, Any] = {}
    for number, rows in enumerate((4, 1)):
        tensors = attention_step(number, keys, rows)
        tensors["logits"] = np.linspace(-2, 3, 16, dtype=np.float32)
        tensors["layers.0.hidden"] = np.full((rows, 8), 1.5, np.float32)
        save_safetensors(folder / f"step{number}.safetensors", tensors)
    description = {
        "source": "my engine",
        "versions": {"my engine": "1.4"},
        "tokens": [{"id": 1, "text": "<s>", "special": True}, 5, 9, 7],
        "steps": [{"file": "step0.safetensors", "chosen": 3}, {"file": "step1.safetensors"}],
        **changes,
    }
    (folder / "flexinspect-import.json").write_text(json.dumps(description), "utf-8")
    return folder
