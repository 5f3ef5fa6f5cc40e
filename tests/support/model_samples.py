"""A tiny model's shape and tokenizer, and a hub on the loopback device."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TINY = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the capital of France is Paris"], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


class Hub:
    """A model hub on 127.0.0.1: refuses with a status, or serves a folder as `org/tiny`.

    `large` are names of files that are stored as LFS objects, with a SHA-256. `stall_after` is the
    number of bytes after which a file's transfer stalls until `resume` is set, `drop_after` the one
    after which the connection is closed, once. `replace` are contents that are sent in place of the
    files', and `sizes` sizes that are announced.
    """

    def __init__(self, status: int, headers: dict[str, str], folder: Path | None) -> None:
        self.requests: list[str] = []
        self.ranges: list[str] = []
        self.large: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.replace: dict[str, bytes] = {}
        self.stall_after: int | None = None
        self.drop_after: int | None = None
        self.stalled = threading.Event()
        self.resume = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, status, headers, folder, body=False)

            def do_GET(self) -> None:
                hub.answer(self, status, headers, folder, body=True)

            def log_message(self, *_args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        folder: Path | None,
        *,
        body: bool,
    ) -> None:
        path = handler.path.partition("?")[0]
        self.requests.append(f"{handler.command} {path}")
        data = b"{}"
        if folder is not None:
            status, headers, data = self._serve(folder, path)
        if body and (asked := handler.headers.get("Range")):
            self.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            if start:
                whole = f"bytes {start}-{len(data) - 1}/{len(data)}"
                status, headers, data = 206, {**headers, "Content-Range": whole}, data[start:]
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if body:
            self._send(handler, data, is_file="/resolve/" in path)

    def _send(self, handler: BaseHTTPRequestHandler, data: bytes, *, is_file: bool) -> None:
        if is_file and self.drop_after is not None and len(data) > self.drop_after:
            handler.wfile.write(data[: self.drop_after])
            self.drop_after, handler.close_connection = None, True
            return
        stop = self.stall_after if is_file else None
        if stop is None or len(data) <= stop or self.resume.is_set():
            handler.wfile.write(data)
            return
        handler.wfile.write(data[:stop])
        handler.wfile.flush()
        self.stalled.set()
        self.resume.wait(60)

    def _serve(self, folder: Path, path: str) -> tuple[int, dict[str, str], bytes]:
        files = sorted(file for file in folder.iterdir() if file.is_file())
        kind = "datasets" if path.startswith(("/api/datasets", "/datasets")) else "models"
        if path.startswith(f"/api/{kind}/org/tiny/tree/"):
            return 200, _JSON, json.dumps([self._tree_entry(file) for file in files]).encode()
        if path.startswith(f"/api/{kind}/org/tiny"):
            siblings = [{"rfilename": f.name} for f in files]
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
            return 200, _JSON, json.dumps(info).encode()
        file = folder / path.rpartition("/")[2]
        if "/org/tiny/resolve/" not in path or not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        data = self.replace.get(file.name, file.read_bytes())
        found = {"ETag": f'"{self._etag(file)}"', "X-Repo-Commit": COMMIT}
        if file.name in self.sizes:
            found["X-Linked-Size"] = str(self.sizes[file.name])
        return 200, found, data

    def _tree_entry(self, file: Path) -> dict[str, Any]:
        size = self.sizes.get(file.name, file.stat().st_size)
        entry: dict[str, Any] = {"type": "file", "path": file.name, "size": size, "oid": _sha(file)}
        if file.name in self.large:
            entry["lfs"] = {"oid": self._etag(file), "size": size, "pointerSize": 128}
        return entry

    def _etag(self, file: Path) -> str:
        is_large = file.name in self.large
        return hashlib.sha256(file.read_bytes()).hexdigest() if is_large else _sha(file)


_JSON = {"Content-Type": "application/json"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _sha(file: Path) -> str:
    data = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


HubMaker = Callable[..., contextlib.AbstractContextManager[Hub]]


Runner = Callable[..., "subprocess.CompletedProcess[str]"]
