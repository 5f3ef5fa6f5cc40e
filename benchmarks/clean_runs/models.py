"""Small random models of a case: family, window, dtype, adapter, and where their weights are."""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from benchmarks.clean_runs import flex_kernel
from benchmarks.clean_runs.cases import ENCODERS, WINDOWED, Case

VOCABULARY, WINDOW, WIDE = 300, 6, 256
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "layer_types": None}
MORE: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "attn_layer_indices": [1],
    },
    "t5": {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "initializer_factor": 0.5,
    },
    "bart": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
        "init_std": 0.2,
    },
}
KINDS = {"gemma3": "gemma3_text"}
KERNELS = {"sdpa": "sdpa", "eager": "eager", "flex": flex_kernel.NAME}


def make(case: Case, seed: int, *, n_layers: int = 2) -> Any:
    """Return the model of a case, in evaluation mode."""
    torch.manual_seed(seed)
    config = _config(case, n_layers)
    auto = AutoModelForSeq2SeqLM if case.family in ENCODERS else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=KERNELS[case.kernel])
    model = model.to(getattr(torch, case.dtype)).eval()
    if case.placement == "sharded-file":
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, max_shard_size="50KB")
            model = auto.from_pretrained(
                folder, dtype=config.dtype, attn_implementation=KERNELS[case.kernel]
            ).eval()
    model = _adapted(model, case.adapter)
    if case.placement == "dispatched":
        from accelerate import dispatch_model  # type: ignore[import-untyped]

        names = [name for name, _ in model.named_children()]
        model = dispatch_model(model, dict.fromkeys(names, "cpu"), force_hooks=True)
    return model


def _config(case: Case, n_layers: int) -> Any:
    options = {**COMMON, **MORE.get(case.family, {}), "num_hidden_layers": n_layers}
    options = {name: value for name, value in options.items() if value is not None or "eos" in name}
    if case.mask == "sliding":
        options["sliding_window"] = WINDOW
        if case.family in ("qwen2", "qwen3"):
            options |= {"use_sliding_window": True, "max_window_layers": 1}
    elif case.family in WINDOWED:
        options["sliding_window"] = WIDE
    elif case.family in ("mistral", "mixtral", "phi3"):
        options["sliding_window"] = None
    config = AutoConfig.for_model(KINDS.get(case.family, case.family), **options)
    config.dtype = getattr(torch, case.dtype)
    return config


class LowRank(nn.Module):
    """A linear layer with a low-rank change beside it, as people write it themselves."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base, kind = base, base.weight.dtype
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=kind)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=kind)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output with the change added."""
        output: Tensor = self.base(x) + self.up(self.down(x)) * self.scale
        return output


def _adapted(model: Any, adapter: str) -> Any:
    if adapter == "none":
        return model
    if adapter == "peft":
        peft = importlib.import_module("peft")  # a package that need not be installed
        options = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, r=4)
        model.add_adapter(options) if hasattr(model, "add_adapter") else None
        return model.eval()
    inner = [
        (parent, name, child)
        for parent_name, parent in model.named_modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and "attn" in parent_name.rpartition(".")[2]
    ]
    for parent, name, child in inner:
        wrapped = LowRank(child).eval()
        if adapter == "by-hand":
            setattr(parent, name, wrapped)
        else:
            with torch.no_grad():
                child.weight += wrapped.scale * wrapped.up.weight @ wrapped.down.weight
    return model
