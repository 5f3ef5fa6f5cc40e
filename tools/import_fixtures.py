"""Make the small dumps that the tests of `flexinspect import` read, with the tools' own code.

    python tools/import_fixtures.py SGLANG

SGLANG is a folder with the unpacked wheel of sglang (`pip download sglang --no-deps`). Its two
dumpers run on a tiny model that has the module names of SGLang's Llama; the modules of SGLang that
they import for types only are replaced, because they need a GPU. transformers' debugger runs on a
tiny Llama. Each dump becomes a zip file in tests/fixtures/dumps.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import types
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "dumps"
PROMPT, CHOSEN = [1, 35, 9, 62, 17], [40, 8, 22]
HIDDEN, HEADS, WIDTH, VOCABULARY, LAYERS = 16, 4, 4, 64, 2


class ForwardBatch:
    """What the dumpers read of SGLang's batch."""

    rids = None

    def __init__(self, ids: list[int], start: int) -> None:
        self.input_ids = torch.tensor(ids)
        self.positions = torch.arange(start, start + len(ids))
        self.seq_lens = torch.tensor([start + len(ids)])
        self.req_pool_indices = torch.tensor([0])


class LogitsProcessorOutput:
    """What the dumpers read of SGLang's logits."""

    def __init__(self, next_token_logits: torch.Tensor) -> None:
        self.next_token_logits = next_token_logits


class Linear(nn.Module):
    """A linear layer that returns its output and no bias, as those of SGLang do."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * n_in**-0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.T, None


class Norm(nn.Module):
    """RMSNorm that adds its input to the residual stream and returns both."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed if residual is None else (normed, total)


class Rotary(nn.Module):
    """Rotary embedding; one object serves all layers."""

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
        return self._turn(positions, q), self._turn(positions, k)

    def _turn(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.view(len(x), -1, WIDTH).chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(1)


class Attention(nn.Module):
    """Causal attention with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any) -> Any:
        if batch.positions[0] == 0:
            self.keys, self.values = [], []
        self.keys.append(k)
        self.values.append(v)
        heads = [
            torch.cat(parts).view(-1, HEADS // 2, WIDTH).repeat_interleave(2, 1)
            for parts in (self.keys, self.values)
        ]
        scores = torch.einsum("qhd,khd->hqk", q.view(-1, HEADS, WIDTH), heads[0]) * WIDTH**-0.5
        rows, keys = batch.positions[:, None], torch.arange(len(heads[0]))
        weights = scores.masked_fill(keys > rows, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, heads[1]).flatten(1)


class SelfAttention(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = Linear(HIDDEN, 2 * HIDDEN), Linear(HIDDEN, HIDDEN)
        self.rotary_emb, self.attn = rotary, Attention()

    def forward(self, positions: torch.Tensor, x: torch.Tensor, batch: Any) -> Any:
        q, k, v = self.qkv_proj(x)[0].split([HIDDEN, HIDDEN // 2, HIDDEN // 2], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v, batch))[0]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.act_fn = Linear(HIDDEN, 2 * HIDDEN), nn.SiLU()
        self.down_proj = Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class Layer(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(rotary), Mlp()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()

    def forward(self, positions: Any, x: Any, batch: Any, residual: Any) -> Any:
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(positions, x, batch), residual)
        return self.mlp(x), residual


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rotary = Rotary()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(rotary) for _ in range(LAYERS))
        self.norm = Norm()

    def forward(self, ids: Any, positions: Any, batch: Any) -> Any:
        x, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            x, residual = layer(positions, x, batch, residual)
        return self.norm(x, residual)[0]


class LogitsProcessor(nn.Module):
    def forward(self, hidden: torch.Tensor, head: torch.Tensor) -> LogitsProcessorOutput:
        return LogitsProcessorOutput(hidden[-1:] @ head.T)


class CausalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.logits_processor = Model(), LogitsProcessor()

    @torch.no_grad()
    def forward(self, ids: Any, positions: Any, batch: Any) -> Any:
        hidden = self.model(ids, positions, batch)
        return self.logits_processor(hidden, self.model.embed_tokens.weight)


def run_passes(
    model: CausalModel, chosen: list[int] = CHOSEN, after_pass: Any = lambda: None
) -> None:
    """Run the prompt and a row for each chosen token."""
    parts = [(PROMPT, 0), *(([id_], len(PROMPT) + n) for n, id_ in enumerate(chosen))]
    for ids, start in parts:
        batch = ForwardBatch(ids, start)
        model.forward(batch.input_ids, batch.positions, batch)
        after_pass()


def load_sglang(folder: Path, name: str) -> Any:
    """Load a debugging module of SGLang beside replacements of what it imports."""

    def replacement(path: str, **attributes: Any) -> None:
        module = types.ModuleType(path)
        vars(module).update(attributes)
        sys.modules[path] = module
        parent, _, name = path.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)

    replacement("zmq")
    for path in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.managers"):
        replacement(path, __path__=[])
    replacement("sglang.srt.model_executor", __path__=[])
    batch = {"ForwardBatch": ForwardBatch, "PPProxyTensors": type("PPProxyTensors", (), {})}
    replacement("sglang.srt.model_executor.forward_batch_info", **batch)
    logits = {"LogitsProcessorOutput": LogitsProcessorOutput}
    replacement("sglang.srt.layers.logits_processor", **logits)
    sockets = dict.fromkeys(("sock_recv", "sock_send", "wrap_as_pickle"))
    replacement("sglang.srt.managers.io_struct", **sockets)
    parallel = types.SimpleNamespace(tp_rank=0, tp_size=1)
    context = {"get_parallel": lambda: parallel, "get_server_args": lambda: None}
    replacement("sglang.srt.runtime_context", **context, get_serving=lambda: None)
    replacement("sglang.srt.utils", get_device=lambda: "cpu")
    replacement("sglang.srt.layers.dp_attention")
    replacement("sglang.srt.distributed")
    replacement("sglang.srt.layers.layer_boundary", __path__=[])
    outputs = {each: type(each, (), {}) for each in ("UnreducedOutput", "OwedOutput")}
    replacement("sglang.srt.layers.layer_boundary.output", **outputs)
    replacement("sglang.srt.layers.layer_boundary.residual", __path__=[])
    replacement("sglang.srt.layers.layer_boundary.residual.stream", **outputs)
    file = folder / "sglang" / "srt" / "debug_utils" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dump_passes(sglang: Path, out: Path) -> None:
    """Write what --debug-tensor-dump-output-folder writes."""
    hook = load_sglang(sglang, "tensor_dump_forward_hook")
    model = CausalModel()
    dumper = hook.register_forward_hook_for_model(model, str(out), None, 1, 0, 0)
    run_passes(model)
    Path(dumper.get_dump_dir()).rename(out / "TP0_PP0_Rank0_pid4321")


def dump_tensors(sglang: Path, out: Path) -> None:
    """Write what DUMPER_ENABLE=1 writes, without most inputs and the parts of the MLP."""
    settings = {"ENABLE": "1", "DIR": str(out), "EXP_NAME": "dump_1", "NON_INTRUSIVE_MODE": "all"}
    settings["FILTER"] = (
        "not search(r'inputs|mlp\\.[ag]|attn\\.[aoq]', name) or name == 'input_ids'"
    )
    settings["ENABLE_OUTPUT_CONSOLE"] = "0"
    os.environ.update({f"DUMPER_{name}": value for name, value in settings.items()})
    dumper = load_sglang(sglang, "dumper").dumper
    model = CausalModel()
    dumper.register_non_intrusive_dumper(model)
    run_passes(model, CHOSEN[:1], dumper.step)


def dump_llama(out: Path) -> None:
    """Write what transformers' debugger writes, with tensors and without."""
    sys.path.insert(0, str(FIXTURES.parents[1]))
    write_debug_tree = import_module("support.dumps").write_debug_tree
    for name, options in (("tensors", {"use_repr": False}), ("text", {"use_repr": True})):
        write_debug_tree(out / name, PROMPT, **options)


def pack(name: str, folder: Path) -> None:
    """Pack a folder into a zip file of the fixtures, the same at every run."""
    FIXTURES.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(FIXTURES / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            info = zipfile.ZipInfo(str(file.relative_to(folder)))
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, file.read_bytes())


def main() -> None:
    sglang = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        writers = {"sglang-passes": dump_passes, "sglang-dumper": dump_tensors}
        for name, write in writers.items():
            torch.manual_seed(0)
            out = Path(folder, name)
            out.mkdir()
            write(sglang, out)
            pack(name, out)
        out = Path(folder, "transformers-debugger")
        dump_llama(out)
        pack(out.name, out)


if __name__ == "__main__":
    main()
