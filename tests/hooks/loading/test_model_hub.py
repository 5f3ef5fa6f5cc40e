"""Errors of downloads from the hub; a downloaded model needs no network."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from support.model_samples import COMMIT, HubMaker, Runner

from flexinspect.inputs.model_names import resolve
from flexinspect_hooks.loading.model_loader import load

FETCH = """
import sys
from flexinspect.core.errors import FlexInspectError
from flexinspect.inputs.model_names import resolve
from flexinspect.inputs.hub_download import fetch_config
try:
    print(fetch_config(resolve(sys.argv[1])))
except FlexInspectError as error:
    print(error.sentence())
    sys.exit(error.exit_code)
"""

LOAD = """
import json, sys
from flexinspect.inputs.model_names import resolve
from flexinspect_hooks.loading.model_loader import load
phases = []
source = resolve(sys.argv[1])
loaded = load(source, device="cpu", report=lambda phase, data: phases.append([phase, dict(data)]))
assert "site-packages" not in loaded.source.name
print(json.dumps({
    "where": source.where,
    "phases": phases,
    "parameters": loaded.n_parameters,
    "ids": loaded.tokenizer.encode("Paris", add_special_tokens=False),
    "again": resolve(sys.argv[1]).where,
}))
"""


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("status", "headers"),
    [(401, {}), (401, {"X-Error-Code": "GatedRepo"}), (403, {"X-Error-Code": "GatedRepo"})],
)
def test_the_error_of_a_gated_model_names_the_licence_page(
    hub: HubMaker, run_python: Runner, status: int, headers: dict[str, str]
) -> None:
    with hub(status, headers) as server:
        done = run_python(FETCH, "llama3.2_1b_it", HF_ENDPOINT=server.url)
    assert done.returncode == 2, done.stderr
    assert "meta-llama/Llama-3.2-1B-Instruct is gated" in done.stdout
    assert "https://huggingface.co/meta-llama/Llama-3.2-1B-Instruct" in done.stdout
    assert "hf auth login" in done.stdout
    assert "--weights random" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("status", [401, 404])
def test_a_misspelled_hub_id_is_reported_as_not_found(
    hub: HubMaker, run_python: Runner, status: int
) -> None:
    with hub(status, {"X-Error-Code": "RepoNotFound"}) as server:
        done = run_python(FETCH, "someone/nothing", HF_ENDPOINT=server.url)
    assert done.returncode == 2, done.stderr
    assert "There is no model someone/nothing" in done.stdout
    assert "--weights random" not in done.stdout  # it would need the configuration, too


def test_a_repository_without_a_configuration_is_not_a_transformers_model(
    hub: HubMaker, run_python: Runner
) -> None:
    with hub(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}) as server:
        done = run_python(FETCH, "someone/data", HF_ENDPOINT=server.url)
    assert done.returncode == 2, done.stderr
    assert "has no config.json" in done.stdout


def test_a_refusal_of_an_open_model_names_what_the_hub_answered(
    hub: HubMaker, run_python: Runner
) -> None:
    with hub(403) as server:
        done = run_python(FETCH, "someone/open", HF_ENDPOINT=server.url)
    assert done.returncode == 2, done.stderr
    assert "it answered 403" in done.stdout


def test_without_a_network_the_error_names_the_alternatives(run_python: Runner) -> None:
    endpoint = f"http://127.0.0.1:{closed_port()}"
    done = run_python(FETCH, "llama3.2_3b_it", HF_ENDPOINT=endpoint)
    assert done.returncode == 2, done.stderr
    assert "cannot be reached" in done.stdout
    for way in (endpoint, "HF_ENDPOINT", "local folder", "--model demo", "--weights random"):
        assert way in done.stdout
    assert "Traceback" not in done.stderr


def test_offline_mode_is_named_as_the_reason(run_python: Runner) -> None:
    done = run_python(FETCH, "qwen3_4b", HF_HUB_OFFLINE="1")
    assert done.returncode == 2, done.stderr
    assert "offline mode is on" in done.stdout


def test_a_download_is_reported_and_then_cached(
    hub: HubMaker,
    run_python: Runner,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    with hub(folder=tiny_llama) as server:
        done = run_python(LOAD, "org/tiny", HF_ENDPOINT=server.url)
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        assert seen["where"] == "download"
        assert seen["again"] == "cached"
        phases = [phase for phase, _ in seen["phases"]]
        order = [phases.index(p) for p in ("plan", "reading weights", "preparing the first step")]
        assert order == sorted(order)
        last = [data for phase, data in seen["phases"] if phase == "downloading"][-1]
        assert last["fraction"] == 1.0
        connected: list[Any] = []
        monkeypatch.setattr(socket.socket, "connect", lambda _, address: connected.append(address))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        cached = resolve("org/tiny")
        assert cached.where == "cached"
        assert load(cached, device="cpu").n_parameters == seen["parameters"]
        assert connected == []
    assert done.stderr == ""


def test_a_snapshot_is_cached_only_when_every_shard_is_there(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--org--tiny"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    assert resolve("org/tiny").where == "download"
    shards = sorted(tiny_llama.glob("*.safetensors"))
    assert len(shards) > 1
    for file in (tiny_llama / "config.json", *tiny_llama.glob("*.index.json"), *shards[:-1]):
        (snapshot / file.name).write_bytes(file.read_bytes())
    assert resolve("org/tiny").where == "download"
    (snapshot / shards[-1].name).symlink_to(tmp_path / "gone")
    assert resolve("org/tiny").where == "download"
    (tmp_path / "gone").write_bytes(shards[-1].read_bytes())
    assert resolve("org/tiny").where == "cached"
    assert resolve("org/tiny").path == snapshot
