"""Small real models and files to load, and separate processes to load them in."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flexinspect
import flexinspect_hooks
from support.model_samples import TINY, Hub, HubMaker, Runner, save_tokenizer


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama in two safetensors files, and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    model.save_pretrained(folder, max_shard_size="40KB")
    save_tokenizer(folder)
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, without any settings of the person who runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def hub() -> HubMaker:
    """Make a hub: `with hub(401) as server: ... server.url`."""

    @contextlib.contextmanager
    def make(
        status: int = 404, headers: dict[str, str] | None = None, folder: Path | None = None
    ) -> Iterator[Hub]:
        server = Hub(status, headers or {}, folder)
        try:
            yield server
        finally:
            server.server.shutdown()
            server.server.server_close()

    return make


@pytest.fixture
def run_python(tmp_path: Path) -> Runner:
    """Run Python code in a new process, with an empty Hugging Face cache."""

    def run(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        packages = [Path(next(iter(p.__path__))).parent for p in (flexinspect, flexinspect_hooks)]
        base = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
        base |= {
            "PYTHONPATH": os.pathsep.join([*map(str, packages), os.environ.get("PYTHONPATH", "")]),
            "HF_HOME": str(tmp_path / "hf"),
            "XDG_CONFIG_HOME": str(tmp_path / "xdg"),
            "NO_PROXY": "127.0.0.1",
        }
        return subprocess.run(
            [sys.executable, "-c", code, *args],
            env={**base, **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
