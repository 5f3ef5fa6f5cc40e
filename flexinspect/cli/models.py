"""`flexinspect models`: the known models, their sizes, and whether they are on this machine."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexinspect.cli.output import print_json, stdout_console
from flexinspect.core.errors import ModelError
from flexinspect.inputs.config import Config, load_config, user_config_file
from flexinspect.inputs.model_names import (
    ALIASES,
    ModelSource,
    count_parameters,
    read_config,
    resolve,
)
from flexinspect.inputs.model_sizes import DTYPE_BYTES, human_bytes, human_count, kv_bytes_per_token

if TYPE_CHECKING:
    from rich.table import Table

_OWN_NAMES = """\
  [models]
  my_model = "org/name"
  local = "checkpoints/step-1000"
  big = { path = "org/name", dtype = "bfloat16" }
"""
DESCRIPTION = (
    "List every model that --model knows by name, its size, and where it is.\n"
    "Only this machine is searched; nothing is downloaded."
)
EXAMPLES = f"""\
examples:
  flexinspect models
  flexinspect models --json | python -m json.tool
  flexinspect run --model llama3.2_3b_it --weights random

your own names, in flexinspect.toml (or under [tool.flexinspect.models] in pyproject.toml):
{_OWN_NAMES}"""


@dataclass(frozen=True, slots=True)
class _ModelRow:
    alias: str
    source: ModelSource | None
    n_parameters: int | None
    kv_bytes: int | None
    problem: str | None = None

    def state(self) -> str:
        if self.source is None:
            return "missing"
        needs_login = self.source.gated and self.source.where == "download"
        return self.source.where + (", gated" if needs_login else "")

    def weight_bytes(self, dtype: str) -> int | None:
        return None if self.n_parameters is None else self.n_parameters * DTYPE_BYTES[dtype]

    def as_json(self) -> dict[str, Any]:
        source = self.source
        return {
            "alias": self.alias,
            "kind": source.kind if source else None,
            "repo_id": source.repo_id if source else None,
            "path": str(source.path) if source and source.path else None,
            "state": source.where if source else "missing",
            "gated": bool(source and source.gated),
            "dtype": source.dtype if source else None,
            "parameters": self.n_parameters,
            "weight_bytes": {name: self.weight_bytes(name) for name in ("bfloat16", "float32")},
            "kv_bytes_per_token_bfloat16": self.kv_bytes,
            "problem": self.problem,
        }


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """Print the table, or JSON with --json."""
    config = load_config()
    rows = [
        _model_row(alias, config) for alias in dict.fromkeys(["demo", *config.models, *ALIASES])
    ]
    if args.json:
        print_json({"models": [row.as_json() for row in rows]})
    else:
        _print(rows, config)
    return 0


def _model_row(alias: str, config: Config) -> _ModelRow:
    # A broken entry must not hide the others.
    try:
        source = resolve(alias, config)
        model = read_config(source) or {}
        return _ModelRow(
            alias, source, count_parameters(source), kv_bytes_per_token(model, "bfloat16")
        )
    except ModelError as error:
        return _ModelRow(alias, None, None, None, error.sentence())


def _print(rows: list[_ModelRow], config: Config) -> None:
    console = stdout_console()
    console.print(_table(rows, full_names=console.width >= 100))
    for row in rows:
        if row.problem:
            console.print(f"{row.alias}: {row.problem}", style="red", markup=False)
    console.print("\n" + _notes(config), markup=False, soft_wrap=True)


def _table(rows: list[_ModelRow], *, full_names: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    # Only two spaces between columns: the widest built-in row has 80 cells.
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    for title in ("name", "model"):
        table.add_column(title, overflow="fold")
    for title in ("params", "bf16", "fp32"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    styles = {"here": "green", "cached": "green", "missing": "red"}
    for row in rows:
        table.add_row(
            Text(row.alias, style="bold"),
            Text(_model_label(row.source, full_names)),
            human_count(row.n_parameters),
            human_bytes(row.weight_bytes("bfloat16")),
            human_bytes(row.weight_bytes("float32")),
            Text(row.state(), style=styles.get(row.state(), "yellow")),
        )
    return table


def _model_label(source: ModelSource | None, full_names: bool) -> str:
    if source is None:
        return ""
    if source.name == "demo":
        return "built in, tiny Llama"
    if source.repo_id:
        return source.repo_id if full_names else source.repo_id.split("/")[1]
    path = str(source.path)
    return path if full_names or len(path) <= 24 else "…" + path[-23:]


def _notes(config: Config) -> str:
    files = ", ".join(str(file) for file in config.files) or "none found"
    return (
        "bf16 and fp32: memory of the weights, without the KV cache.\n"
        "gated: accept the licence on the model's page, then run `hf auth login`.\n"
        "Without weights, `--weights random` builds the real architecture at its real size.\n"
        "\n"
        "Your own names: in flexinspect.toml, [tool.flexinspect.models] of pyproject.toml, "
        f"or {user_config_file() or 'the per-user file'}:\n"
        f"{_OWN_NAMES}Settings files: {files}."
    )
