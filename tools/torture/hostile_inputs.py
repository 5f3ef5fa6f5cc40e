"""Hostile settings, declarations, datasets, masks, tables, model folders, dumps and plug-ins.

Each seed changes a valid file (a value, a key, the text, its bytes), or makes one of a text that
breaks parsers, and gives it to what reads such files.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np

from flexinspect.breakpoints import grammar
from flexinspect.core import plugins
from flexinspect.inputs import (
    config,
    datasets,
    declarations,
    kernel_configs,
    model_names,
    model_sizes,
)
from tools.torture.judged import Problem, problem_of
from tools.torture.plain_data import changed
from tools.torture.results import Failure

DUMPS = Path(__file__).parents[2] / "tests" / "fixtures" / "dumps"
DEEP = 50_000
TEXTS = (
    *(
        "[" * DEEP,
        '{"a":' * DEEP,
        "a = " + "[" * DEEP,
        "9" * 10_000,
        "x = " + "9" * 10_000,
        "",
        "\0",
    ),
    *("\ufeff{}", "[models]\n" * 2, "a.b" + ".c" * DEEP + " = 1", '"' * 999, "#" * 10**6, "\r\r\r"),
    *("nan", "-", '{"a": 1e999999}', "a\0 = 1", '"\\ud800"', "id\tquestion\n" + "\t" * 10**5),
    *('a,"b\n' * 1000, "x" * 200_000, "[[x]]\n" * 20_000, "\n".join(map(str, range(50_000)))),
)
SETTINGS = {
    "models": {
        "mine": "org/name",
        "local": "checkpoints/step-1",
        "big": {"path": "org/n", "dtype": "bfloat16"},
    },
    "keys": {"app.quit": "q"},
    "breakpoints": {"odd": "entropy > 3"},
    "debugging": {"nan": True},
    "figures": {"lang": "en"},
}
DECLARATION = {
    "mask": "segment-isolation",
    "separators": "attached",
    "segments": [
        {"start": 0, "stop": 4, "label": "shared", "kind": "shared"},
        {"text": "Paris", "label": "one", "kind": "paraphrase"},
    ],
}
SAMPLES = [
    {
        "id": "a",
        "question": "Where?",
        "answers": ["here"],
        "paraphrases": ["Which place?", "Where to?"],
    },
    {"id": "b", "question": "Who?", "answers": ["she"], "paraphrases": ["Which person?"]},
]
SIZES = {"num_paraphrases": 3, "tokens_per_paraphrase": 4, "separator_tokens": 1}
KERNELS = {
    "config": [{"name": "mine", "mask": "causal", "q_len": 16, "kv_len": 16, "dtype": "float32"}],
    "kernel": [{"name": "own", "call": "own:attend"}],
}
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "torch_dtype": "float32",
}
EXPRESSIONS = ("entropy > 3", "nan in layers.* and step >= 2", "finding = 'mask.*' or margin < 0.1")
MASKS = ("causal & window(4)", "causal | prefix(3)", "segment-isolation", "~causal")


# -- how files are damaged -------------------------------------------------------------------------


def to_toml(data: Any) -> str:
    """Return plain data as TOML, with inline tables; what TOML lacks becomes a text."""
    return "\n".join(f"{_key(key)} = {_toml(value)}" for key, value in data.items()) + "\n"


def _key(key: str) -> str:
    return json.dumps(key)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else json.dumps(value)


def damaged(data: Any, form: Callable[[Any], str], rng: random.Random) -> bytes:
    """Return a file of plain data with something wrong in it."""
    kind = rng.choice(("leaf", "leaf", "leaf", "leaves", "text", "bytes", "cut"))
    if kind == "text":
        return rng.choice(TEXTS).encode("utf-8", "surrogatepass")
    for _ in range(3 if kind == "leaves" else kind == "leaf"):
        new = changed(data, rng)
        data = new if isinstance(new, type(data)) else data
    whole = bytearray(form(data).encode("utf-8", "surrogatepass"))
    if kind == "cut":
        del whole[rng.randrange(len(whole)) :]
    for _ in range(rng.choice((1, 5, 50)) if kind == "bytes" else 0):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    return bytes(whole)


def _to_csv(rows: Any) -> str:
    lines = (",".join(map(str, row)) if isinstance(row, list) else str(row) for row in rows)
    return "\n".join(lines)


def _write(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


# -- who reads them --------------------------------------------------------------------------------


def _main(*argv: str) -> Callable[[], object]:
    from flexinspect.cli.main import main

    return lambda: main(list(argv))


def settings(rng: random.Random, folder: Path) -> Callable[[], object]:
    """Settings."""
    name = rng.choice(("flexinspect.toml", "pyproject.toml"))
    data = SETTINGS if name == "flexinspect.toml" else {"tool": {"flexinspect": SETTINGS}}
    _write(folder / name, damaged(data, to_toml, rng))
    if rng.random() < 0.5:
        return lambda: config.load_config(folder)
    return _main("models", *rng.choice(((), ("--json",))))


def declaration(rng: random.Random, folder: Path) -> Callable[[], object]:
    """A declaration."""
    form, suffix = rng.choice(((to_toml, "toml"), (json.dumps, "json")))
    file = _write(folder / f"declared.{suffix}", damaged(DECLARATION, form, rng))
    return lambda: declarations.read_declaration(file)


def dataset(rng: random.Random, folder: Path) -> Callable[[], object]:
    """A data set."""
    suffix = rng.choice(("json", "jsonl", "csv", "tsv"))
    if suffix == "json":
        content = damaged(SAMPLES, json.dumps, rng)
    elif suffix == "jsonl":
        content = b"\n".join(damaged(one, json.dumps, rng) for one in SAMPLES)
    else:
        rows = [[*SAMPLES[0]], *([json.dumps(v) for v in one.values()] for one in SAMPLES)]
        content = damaged(rows, _to_csv, rng)
    file = _write(folder / f"data.{suffix}", content)
    name = rng.choice((str(file), f"webqa:{file}", f"myriadlama:{file}"))
    return lambda: datasets.load(name) and None


def mask_sizes(rng: random.Random, folder: Path) -> Callable[[], object]:
    """A file with the sizes of a mask, or its cells."""
    kind = rng.choice(("toml", "json", "npy", "text"))
    if kind == "text":
        text = rng.choice((changed([*MASKS], rng), [*TEXTS]))
        chosen = str(rng.choice(text) if isinstance(text, list) and text else text)
        return _main(
            "mask", "small", "--mask", chosen[:100_000].replace("\0", "") or "x", "--plain"
        )
    file = folder / f"sizes.{kind}"
    if kind == "npy":
        shape = rng.choice(((4, 4), (0, 4), (2, 3, 3), (), (70000, 1)))
        np.save(file, np.ones(shape, rng.choice(("bool", "int8", "float64", "<U4", "O"))))
        data = bytearray(file.read_bytes())
        for _ in range(rng.choice((0, 1, 4))):
            data[rng.randrange(min(len(data), 128))] = rng.randrange(256)
        _write(file, bytes(data))
    else:
        _write(file, damaged(SIZES, to_toml if kind == "toml" else json.dumps, rng))
    return _main("mask", str(file), "--plain", *rng.choice(((), ("--analysis",))))


def kernel_table(rng: random.Random, folder: Path) -> Callable[[], object]:
    """A table of kernels."""
    file = _write(folder / "kernels.toml", damaged(KERNELS, to_toml, rng))
    return lambda: kernel_configs.read_table(file) and None


def model_folder(rng: random.Random, folder: Path) -> Callable[[], object]:
    """A model folder."""
    _write(folder / "config.json", damaged(MODEL, json.dumps, rng))
    header: Any = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    head = damaged(header, json.dumps, rng)
    length = rng.choice((len(head), len(head), 2**63, 0, 2**32))
    _write(folder / "model.safetensors", struct.pack("<Q", length) + head + bytes(16))
    if rng.random() < 0.3:
        index = {"weight_map": {"w": "model.safetensors", "v": "../../x.safetensors"}}
        _write(folder / model_sizes.INDEX_FILE, damaged(index, json.dumps, rng))

    def read() -> None:
        source = model_names.resolve(str(folder))
        found = model_names.read_config(source)
        model_names.count_parameters(source)
        model_names.has_all_weights(folder)
        if found is not None:
            model_sizes.parameter_count(found)
            model_sizes.kv_bytes_per_token(found, "float32")
        model_sizes.stored_parameter_count(folder)

    return read


def dump(rng: random.Random, folder: Path) -> Callable[[], object]:
    """A dump of another tool."""
    packed = rng.choice(sorted(DUMPS.glob("*.zip")))
    place = folder / "dump"
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(place)
    files = sorted(file for file in place.rglob("*") if file.is_file())
    for _ in range(rng.choice((1, 1, 3))):
        file = rng.choice(files)
        data = bytearray(file.read_bytes())
        if file.suffix == ".json" and rng.random() < 0.7:
            with contextlib.suppress(ValueError):
                data = bytearray(damaged(json.loads(data), json.dumps, rng))
        elif rng.random() < 0.2:
            del data[rng.randrange(len(data) or 1) :]
        elif data:
            for _ in range(rng.choice((1, 10, 200))):
                data[rng.randrange(len(data))] = rng.randrange(256)
        file.write_bytes(bytes(data))
    inner = next((each for each in place.iterdir() if each.is_dir()), place)
    return _main("import", str(rng.choice((place, inner))), "-o", str(folder / "out.flextrace"))


def expression(rng: random.Random, folder: Path) -> Callable[[], object]:
    """A condition of a breakpoint."""
    text = list(rng.choice((*EXPRESSIONS, *TEXTS))[:20_000])
    for _ in range(rng.choice((0, 1, 3, 10))):
        text.insert(rng.randrange(len(text) + 1), rng.choice("()'\"\\*<>=!.andornot \x1b\u202e9"))
    return lambda: grammar.parse("".join(text)) and None


PLUGIN = """
import sys
def _deep(): return _deep()
class Odd:
    name = title = "odd"
    help = initial_options = None
    def __getattr__(self, name): {act}
    def load(self, source, request): {act}
{top}
"""
ACTS = (
    "raise ValueError('\\x1b[2J')",
    "raise SystemExit(3)",
    "_deep()",
    "return None",
    "return self",
)


def plug_in(rng: random.Random, folder: Path) -> Callable[[], object]:
    """A plug-in that raises."""
    module = f"hostile_plugin_{rng.randrange(10**9)}"
    top = rng.choice(("", "", rng.choice(ACTS[:3]), "import no_such_module", "1 +"))
    code = PLUGIN.format(act=rng.choice(ACTS), top=top)
    _write(folder / f"{module}.py", code.encode())
    group = rng.choice((plugins.PANELS, plugins.RULES, plugins.EXPORTS, plugins.IMPORTERS))
    value = f"{module}:{rng.choice(('Odd', 'Odd', 'missing', '_deep', 'sys'))}"
    points = {group: (EntryPoint("odd", value, group),)}
    commands = {
        plugins.PANELS: ("show", "{trace}"),
        plugins.RULES: ("findings", "{trace}"),
        plugins.EXPORTS: ("export", "{trace}", "--to", "odd", "-o", str(folder / "out")),
        plugins.IMPORTERS: ("import", str(folder)),
    }

    def run() -> object:
        import sys

        from flexinspect.cli.main import main

        real = plugins._entry_points
        vars(plugins)["_entry_points"] = lambda group: points.get(group, ())
        sys.path.insert(0, str(folder))
        try:
            trace = str(folder.parent / "prepared" / "generation.flextrace")
            return main([word.replace("{trace}", trace) for word in commands[group]])
        finally:
            sys.path.remove(str(folder))
            vars(plugins)["_entry_points"] = real

    return run


TARGETS = (
    *(settings, declaration, dataset, mask_sizes, kernel_table, model_folder, dump, expression),
    plug_in,
)


def prepare(folder: Path) -> None:
    """Unpack the traces that plug-ins work on, and import every target."""
    from tools.torture.mutants import unpack

    unpack(folder)


def attempt(_: None, seed: int, folder: Path) -> list[Failure]:
    """Give one hostile file to what reads it."""
    rng, target = random.Random(seed), TARGETS[seed % len(TARGETS)]
    before = Path.cwd()
    os.chdir(folder)
    try:
        found: Problem | None = problem_of(target(rng, folder))
    finally:
        os.chdir(before)
    how = (target.__doc__ or "").strip(".\n ")
    return [] if found is None else [Failure(found.kind, found.detail, how)]
