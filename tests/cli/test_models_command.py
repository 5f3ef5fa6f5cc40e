"""`flexinspect models` answers at once, without torch, at any width."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from support.model_samples import Runner

from flexinspect.cli import models as command
from flexinspect.cli.main import main
from flexinspect.inputs.model_names import ALIASES

COMMAND = """
import sys
from flexinspect.cli.main import main
code = main(["models", *sys.argv[1:]])
heavy = {"torch", "transformers", "textual", "flexinspect_hooks"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


def test_the_list_is_printed_without_torch_and_fits_80_columns(run_python: Runner) -> None:
    done = run_python(COMMAND)
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("\n\n")[0].splitlines()
    assert all(len(line.rstrip()) <= 80 for line in table)
    for alias in ("demo", *ALIASES):
        assert any(line.startswith(alias + " ") for line in table), alias
    row = next(line for line in table if line.startswith("llama3.2_3b_it"))
    figures = "Llama-3.2-3B-Instruct 3.2 B 6.4 GB 12.9 GB download, gated"
    assert " ".join(row.split()[1:]) == figures
    assert "\x1b" not in done.stdout
    assert "my_model" in done.stdout


def test_a_wide_terminal_shows_whole_hub_ids(run_python: Runner) -> None:
    done = run_python(COMMAND, COLUMNS="140")
    assert "meta-llama/Llama-3.2-3B-Instruct" in done.stdout


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_no_color_is_respected(run_python: Runner, no_color: str, coloured: bool) -> None:
    done = run_python(COMMAND, FORCE_COLOR="1", NO_COLOR=no_color, TERM="xterm-256color")
    assert ("\x1b[32m" in done.stdout or "\x1b[33m" in done.stdout) == coloured


def test_json_has_the_exact_figures(run_python: Runner) -> None:
    done = run_python(COMMAND, "--json")
    rows = {row["alias"]: row for row in json.loads(done.stdout)["models"]}
    llama = rows["llama3.2_1b"]
    assert llama["repo_id"] == "meta-llama/Llama-3.2-1B"
    assert llama["parameters"] == 1_235_814_400
    assert llama["weight_bytes"] == {"bfloat16": 2_471_628_800, "float32": 4_943_257_600}
    assert llama["kv_bytes_per_token_bfloat16"] == 32_768
    assert (llama["state"], llama["gated"]) == ("download", True)


def test_own_models_are_listed_and_a_lost_one_does_not_hide_the_others(
    home: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "flexinspect.toml").write_text(
        f'[models]\ntiny = "{tiny_llama}"\nlost = "./gone"\n', encoding="utf-8"
    )
    assert command.run(argparse.Namespace(json=True)) == 0
    rows = {row["alias"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert rows["tiny"]["state"] == "here"
    assert rows["tiny"]["parameters"] == 28_832
    assert rows["lost"]["state"] == "missing"
    assert "neither a folder nor a hub id" in rows["lost"]["problem"]
    assert command.run(argparse.Namespace(json=False)) == 0
    printed = capsys.readouterr().out
    assert "29 k" in printed
    assert "neither a folder nor a hub id" in printed.replace("\n", " ")
    assert str(home / "flexinspect.toml") in printed


def test_help_shows_how_to_add_own_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "--help"])
    assert "[models]" in capsys.readouterr().out


def test_none_of_the_light_modules_imports_torch(run_python: Runner) -> None:
    done = run_python(
        "import sys\n"
        "from flexinspect.inputs import config, datasets, model_names, model_sizes\n"
        "assert not {'torch', 'transformers', 'datasets', 'rich'} & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr
