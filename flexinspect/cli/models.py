"""`flexinspect models`: the known models, their sizes, and whether they are on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from flexinspect.cli.output import print_json, stdout_console
from flexinspect.core.errors import ModelError
from flexinspect.inputs.config import Config, load_config, user_config_file
from flexinspect.inputs.model_names import ALIASES, count_parameters, read_config, resolve
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


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """Print the table, or JSON with --json."""
    config = load_config()
    models = [model_facts(alias, config) for alias in model_names(config)]
    if args.json:
        print_json({"models": models})
        return 0
    console = stdout_console()
    console.print(_table(models, full_names=console.width >= 100))
    for model in models:
        if model["problem"]:
            console.print(f"{model['alias']}: {model['problem']}", style="red")
    console.print("\n" + _notes(config), soft_wrap=True)
    return 0


def model_names(config: Config) -> list[str]:
    """Return the names that --model knows: the demo, the user's and the built-in aliases."""
    return [*dict.fromkeys(["demo", *config.models, *ALIASES])]


def model_facts(alias: str, config: Config) -> dict[str, Any]:
    """Return what is printed about a model: a broken entry must not hide the others."""
    source = n_parameters = kv_bytes = problem = None
    try:
        source = resolve(alias, config)
        n_parameters = count_parameters(source)
        kv_bytes = kv_bytes_per_token(read_config(source) or {}, "bfloat16")
    except ModelError as error:
        source = n_parameters = None
        problem = error.sentence()
    return {
        "alias": alias,
        "kind": source.kind if source else None,
        "repo_id": source.repo_id if source else None,
        "path": str(source.path) if source and source.path else None,
        "state": source.where if source else "missing",
        "gated": bool(source and source.gated),
        "dtype": source.dtype if source else None,
        "parameters": n_parameters,
        "weight_bytes": {
            name: None if n_parameters is None else n_parameters * DTYPE_BYTES[name]
            for name in ("bfloat16", "float32")
        },
        "kv_bytes_per_token_bfloat16": kv_bytes,
        "problem": problem,
    }


def _table(models: list[dict[str, Any]], *, full_names: bool) -> Table:
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
    for model in models:
        state = model["state"]
        needs_login = model["gated"] and state == "download"
        table.add_row(
            Text(model["alias"], style="bold"),
            Text(_model_label(model, full_names)),
            human_count(model["parameters"]),
            *map(human_bytes, model["weight_bytes"].values()),
            Text(state + (", gated" if needs_login else ""), style=styles.get(state, "yellow")),
        )
    return table


def _model_label(model: dict[str, Any], full_names: bool) -> str:
    if model["alias"] == "demo":
        return "built in, tiny Llama"
    if repo_id := model["repo_id"]:
        return str(repo_id if full_names else repo_id.split("/")[1])
    path = model["path"] or ""
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
