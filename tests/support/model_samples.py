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
    """A model hub on 127.0.0.1: refuses with a status, or serves a folder as `org/tiny`."""

    def __init__(self, status: int, headers: dict[str, str], folder: Path | None) -> None:
        self.requests: list[str] = []
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
        self.requests.append(path)
        data = b"{}"
        if folder is not None:
            status, headers, data = _serve(folder, path)
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if body:
            handler.wfile.write(data)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _serve(folder: Path, path: str) -> tuple[int, dict[str, str], bytes]:
    files = sorted(file for file in folder.iterdir() if file.is_file())
    if path.startswith("/api/models/org/tiny/tree/"):
        tree = [
            {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _sha(f)}
            for f in files
        ]
        return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
    if path.startswith("/api/models/org/tiny"):
        siblings = [{"rfilename": f.name} for f in files]
        info = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
        return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
    file = folder / path.rpartition("/")[2]
    if not path.startswith("/org/tiny/resolve/") or not file.is_file():
        return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
    return 200, {"ETag": f'"{_sha(file)}"', "X-Repo-Commit": COMMIT}, file.read_bytes()


def _sha(file: Path) -> str:
    data = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


HubMaker = Callable[..., contextlib.AbstractContextManager[Hub]]


Runner = Callable[..., "subprocess.CompletedProcess[str]"]
