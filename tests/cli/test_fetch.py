"""`flexinspect fetch` against a hub on the loopback device, in processes with an empty cache."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.model_fixtures import hub, run_python
from support.model_samples import COMMIT, Hub, HubMaker, Runner

__all__ = ["hub", "run_python"]

FETCH = "import sys; from flexinspect.cli.main import main; sys.exit(main(sys.argv[1:]))"
WEIGHTS = "model.safetensors"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The files of a small model: a configuration in git, and weights of 2 MB."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / WEIGHTS).write_bytes(bytes(range(256)) * 8192)
    (folder / "train.py").write_text("raise SystemExit")
    return folder


@pytest.fixture
def server(hub: HubMaker, repository: Path) -> Iterator[Hub]:
    with hub(folder=repository) as server:
        server.large.add(WEIGHTS)
        yield server
        server.resume.set()


def test_a_model_is_fetched_and_every_file_compared_with_its_checksum(
    server: Hub, run_python: Runner, repository: Path
) -> None:
    done = run_python(FETCH, "fetch", "--model", "org/tiny", "--json", HF_ENDPOINT=server.url)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["fetched"]
    size = sum((repository / name).stat().st_size for name in ("config.json", WEIGHTS))
    assert (found["repo_id"], found["bytes"], found["verified"]) == ("org/tiny", size, 2)
    files = sorted(file.name for file in Path(found["path"]).iterdir())
    assert files == ["config.json", WEIGHTS]  # no code
    assert (Path(found["path"]) / WEIGHTS).read_bytes() == (repository / WEIGHTS).read_bytes()
    again = run_python(FETCH, "fetch", "--model", "org/tiny", HF_ENDPOINT=server.url)
    assert "org/tiny: was here already, 2 checksums right" in again.stdout


def test_a_dropped_connection_continues_where_it_stopped(
    server: Hub, run_python: Runner, repository: Path
) -> None:
    content = bytes(range(256)) * 98_304  # the client reads chunks of 10 MB
    (repository / WEIGHTS).write_bytes(content)
    server.drop_after = 15_000_000
    done = run_python(FETCH, "fetch", "--model", "org/tiny", "--json", HF_ENDPOINT=server.url)
    assert done.returncode == 0, done.stderr
    starts = [int(one.removeprefix("bytes=").partition("-")[0]) for one in server.ranges]
    assert any(start > 5_000_000 for start in starts)
    (found,) = json.loads(done.stdout)["fetched"]
    assert (Path(found["path"]) / WEIGHTS).read_bytes() == content


def test_ctrl_c_keeps_the_files_that_are_complete(
    server: Hub, run_python: Runner, tmp_path: Path, repository: Path
) -> None:
    server.stall_after = 1_000_000
    process = subprocess.Popen(
        [sys.executable, "-c", FETCH, "fetch", "--model", "org/tiny"],
        env={**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stalled.wait(60)
    snapshot = tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    while not (snapshot / "config.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    blobs = snapshot.parents[1] / "blobs"
    assert list(blobs.glob("*.incomplete"))
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)  # while the transfer still hangs
    assert process.returncode == 130, stderr
    assert stderr == "flexinspect: interrupted; complete files are kept\n"
    assert not list(blobs.glob("*.incomplete"))
    server.resume.set()
    server.requests.clear()
    done = run_python(FETCH, "fetch", "--model", "org/tiny", "--json", HF_ENDPOINT=server.url)
    assert done.returncode == 0, done.stderr
    fetched = [request for request in server.requests if request.startswith("GET /org/tiny/")]
    assert not any("config.json" in request for request in fetched)


def test_a_file_with_a_wrong_checksum_is_removed_and_fetched_again(
    server: Hub, run_python: Runner, repository: Path
) -> None:
    content = (repository / WEIGHTS).read_bytes()
    server.replace[WEIGHTS] = b"\xff" + content[1:]
    done = run_python(FETCH, "fetch", "--model", "org/tiny", HF_ENDPOINT=server.url)
    assert done.returncode == 2
    assert f"The file {WEIGHTS} is damaged: its checksum differs" in done.stderr
    assert "Traceback" not in done.stderr
    server.replace.clear()
    again = run_python(FETCH, "fetch", "--model", "org/tiny", "--json", HF_ENDPOINT=server.url)
    assert again.returncode == 0, again.stderr
    (found,) = json.loads(again.stdout)["fetched"]
    blob = (Path(found["path"]) / WEIGHTS).resolve()
    assert blob.name == hashlib.sha256(content).hexdigest()


def test_a_model_that_is_larger_than_the_disk_is_refused_before_the_download(
    server: Hub, run_python: Runner
) -> None:
    server.sizes[WEIGHTS] = 10**18
    done = run_python(FETCH, "fetch", "--model", "org/tiny", HF_ENDPOINT=server.url)
    assert done.returncode == 2
    assert "needs 1000000000.0 GB more, and" in done.stderr
    assert "HF_HOME" in done.stderr
    assert not any(request.startswith("GET") and WEIGHTS in request for request in server.requests)


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (401, {"X-Error-Code": "GatedRepo"}, "hf auth login"),
        (401, {}, "There is no model org/tiny"),
        (403, {}, "it answered 403"),
        (404, {"X-Error-Code": "RepoNotFound"}, "There is no model org/tiny"),
        (429, {"Retry-After": "0"}, "refuses more requests for now (429)"),
        (500, {}, "it answered 500"),
    ],
)
def test_every_refusal_of_the_hub_is_one_sentence_with_the_next_step(
    hub: HubMaker, run_python: Runner, status: int, headers: dict[str, str], words: str
) -> None:
    with hub(status, headers) as server:
        done = run_python(FETCH, "fetch", "--model", "org/tiny", HF_ENDPOINT=server.url)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_route_the_mirror_and_the_proxy_are_named(run_python: Runner) -> None:
    done = run_python(FETCH, "fetch", "--dataset-only", "webqa", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 2
    assert "The dataset stanfordnlp/web_questions is not on this machine" in done.stderr
    for way in ("HF_ENDPOINT", "HTTPS_PROXY", "--dataset FILE.jsonl"):
        assert way in done.stderr


def test_a_dataset_is_fetched_without_its_code(
    server: Hub, run_python: Runner, repository: Path
) -> None:
    (repository / "test.jsonl").write_text('{"question": "Who wrote Emma?"}\n')
    alias = "from flexinspect.inputs.datasets import PUBLIC_DATASETS as known; "
    alias += "known['webqa'] = known['webqa']._replace(repo_id='org/tiny'); "
    arguments = ("fetch", "--dataset", "webqa", "--json")
    done = run_python(alias + FETCH, *arguments, HF_ENDPOINT=server.url)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["fetched"]
    files = sorted(file.name for file in Path(found["path"]).iterdir())
    assert files == ["config.json", "test.jsonl"]
    assert any(request.startswith("GET /datasets/org/tiny/resolve/") for request in server.requests)


def test_the_cache_is_reported_and_cleared_only_with_yes(server: Hub, run_python: Runner) -> None:
    def fetch(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_python(FETCH, "fetch", *arguments, HF_ENDPOINT=server.url)

    assert "0 B  in" in fetch("--report").stdout
    assert fetch("--model", "org/tiny").returncode == 0
    assert "2 MB  model    org/tiny  (2 files, used 20" in fetch("--report").stdout
    dry = fetch("--clear")
    assert "2 MB would be freed. Nothing was deleted" in dry.stdout
    assert "org/tiny" in fetch("--report").stdout
    wrong = fetch("--clear", "org/tini", "--yes")
    assert wrong.returncode == 2
    assert "org/tiny" in wrong.stderr
    assert "2 MB freed" in fetch("--clear", "org/tiny", "--yes").stdout
    assert json.loads(fetch("--report", "--json").stdout)["cache"]["repositories"] == []


def test_a_request_without_anything_to_fetch_or_confirm_is_refused(run_python: Runner) -> None:
    nothing = run_python(FETCH, "fetch")
    assert nothing.returncode == 2
    assert "Nothing to fetch" in nothing.stderr
    unknown = run_python(FETCH, "fetch", "--dataset", "webq")
    assert unknown.returncode == 2
    assert "webqa, myriadlama" in unknown.stderr
    assert run_python(FETCH, "fetch", "--yes").returncode == 2


def test_the_list_says_what_is_here_and_what_needs_a_download(run_python: Runner) -> None:
    lines = run_python(FETCH, "fetch", "--list").stdout.splitlines()
    demo = next(line for line in lines if line.startswith("model    demo"))
    assert "here" in demo
    llama = next(line for line in lines if "llama3.2_3b_it" in line)
    assert "6.4 GB  download, gated" in llama
    assert lines[-1].endswith("iszhaoxin/MyriadLAMA")
    assert COMMIT not in "".join(lines)
