"""Loads a causal language model: from a folder, the cache or the hub, or with random weights."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from flexinspect.core.errors import FlexInspectError, ModelError, is_out_of_memory
from flexinspect.core.garbage_collection import no_garbage_collection
from flexinspect.core.signals import as_interrupt
from flexinspect.inputs import hub_download, model_sizes
from flexinspect.inputs.hub_download import OnLoadProgress
from flexinspect.inputs.model_names import ModelSource, cached_snapshot, read_config_file
from flexinspect_hooks.loading import placement
from flexinspect_hooks.loading.library_output import quiet_libraries
from flexinspect_hooks.loading.tokenizers import IdTokenizer

MAX_LAYERS = 10_000  # of a configuration; building a million takes minutes
WEIGHTS = ("pretrained", "random")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class LoadedModel(Struct, frozen=True):
    """A model that is ready to run, in evaluation mode and without gradients.

    `tokenizer` is None if there is none on this machine (random weights only).
    `weights_fingerprint` identifies the weights in the manifest; `config` is the transformers
    configuration as a dict.
    """

    model: Any
    tokenizer: Any | None
    device: str
    dtype: str
    source: ModelSource
    n_parameters: int
    weights_fingerprint: str
    config: Mapping[str, Any]
    weights: str

    def tokenizer_or_ids(self) -> Any:
        """Return the tokenizer, or an `IdTokenizer` that shows ids in place of text."""
        return self.tokenizer or IdTokenizer.from_config(self.config)

    def facts(self) -> dict[str, Any]:
        """Return the facts about the model for the trace."""
        from flexinspect_hooks.capture.model_layers import model_facts

        return {
            **model_facts(self.model),
            "name": self.source.name,
            "place": self.source.place,
            "weights": self.weights,
            "weights_fingerprint": self.weights_fingerprint,
            "parameters": self.n_parameters,
            "device": self.device,
            "dtype": self.dtype,
            "tokenizer": self.tokenizer is not None,
            "layers": int(self.model.config.num_hidden_layers),
        }


class _LoadRequest(Struct, frozen=True):
    """The arguments of `load`, with the device resolved."""

    source: ModelSource
    weights: str
    seed: int
    device: str
    trust: bool
    report: OnLoadProgress
    needs_tokenizer: bool = True


def load(
    source: ModelSource,
    *,
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "pretrained",
    seed: int = 0,
    trust_remote_code: bool = False,
    report: OnLoadProgress | None = None,
    n_tokens: int = 2048,
    needs_tokenizer: bool = True,
) -> LoadedModel:
    """Load a model, or raise `ModelError` with one sentence and the next step.

    `device`: auto, cpu, cuda, cuda:N, mps. `dtype`: auto, float32, bfloat16, float16. `weights`:
    "pretrained", or "random" (the real architecture at its real size, seeded by `seed`).
    `n_tokens` is the cache length that the memory check assumes. Without `needs_tokenizer` a folder
    that has none is no error.

    `report(phase, data)` is called with the progress: "plan" (name, source, bytes needed and free;
    before anything large is read), "downloading" (from other threads), "reading weights" and
    "making weights" (`fraction` from 0 to 1), "note" (`text`), and at the end "preparing the
    first step" (`seconds` that loading took). Nothing is written to the terminal, nothing is
    unpickled.
    """
    if weights not in WEIGHTS:
        raise ModelError(f"--weights {weights} is unknown.", hint=f"Use {' or '.join(WEIGHTS)}.")
    started = time.perf_counter()
    place = placement.choose_device(device)
    request = _LoadRequest(
        source,
        weights,
        seed,
        place,
        trust_remote_code,
        report or (lambda _phase, _data: None),
        needs_tokenizer,
    )
    try:
        # transformers reports an interrupted import as a package that is not installed.
        with quiet_libraries(request.report), as_interrupt():
            loaded = _load(request, dtype, n_tokens)
    except FlexInspectError:
        raise
    except Exception as error:
        raise _explain_load_error(error, source, place) from error
    request.report("preparing the first step", {"seconds": time.perf_counter() - started})
    return loaded


def load_tokenizer(
    source: ModelSource, *, trust_remote_code: bool = False, report: OnLoadProgress | None = None
) -> Any:
    """Load the tokenizer of a model and nothing else, or raise `ModelError`.

    That of a hub model is downloaded if it is not on this machine. A folder without one gives an
    `IdTokenizer`, which shows ids in place of text. `report` is called as by `load`.
    """
    report = report or (lambda _phase, _data: None)
    request = _LoadRequest(source, "random", 0, "cpu", trust_remote_code, report)
    try:
        with quiet_libraries(report), as_interrupt():
            if _vocabulary_folder(source) is None and source.repo_id is not None:
                return _load_tokenizer(hub_download.fetch_tokenizer(source, report), request)
            tokenizer = _find_tokenizer(request)
            return tokenizer or IdTokenizer.from_config(_load_config(request).to_dict())
    except FlexInspectError:
        raise
    except Exception as error:
        raise _explain_load_error(error, source, "cpu") from error


def _load(request: _LoadRequest, dtype: str, n_tokens: int) -> LoadedModel:
    with no_garbage_collection():  # the class of the model brings most of transformers with it
        config = _load_config(request)
        require_causal_lm(config, request.source)
    requested = request.source.dtype if dtype == "auto" and request.source.dtype else dtype
    chosen = placement.choose_dtype(requested, request.device, config.to_dict())
    _check_memory(request, config, chosen, n_tokens)
    make_model = _make_random if request.weights == "random" else _load_pretrained
    model, tokenizer, fingerprint = make_model(request, config, chosen)
    model.eval()
    model.requires_grad_(False)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        device=request.device,
        dtype=chosen,
        source=request.source,
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights_fingerprint=fingerprint,
        config=model.config.to_dict(),
        weights=request.weights,
    )


def _load_config(request: _LoadRequest) -> Any:
    from transformers import AutoConfig

    source = request.source
    folder = source.path or (cached_snapshot(source.repo_id) if source.repo_id else None)
    if folder is None and request.weights == "random" and source.config_path:
        shipped = json.loads(source.config_path.read_text(encoding="utf-8"))
        return AutoConfig.for_model(shipped.pop("model_type"), **shipped)
    if folder is None:
        request.report("downloading", {"file": "config.json", "fraction": None})
        folder = hub_download.fetch_config(source)
    _require_known_architecture(folder, source, trusted=request.trust)
    if request.trust and source.path is None:
        folder = hub_download.fetch_code(source)
    return AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=request.trust
    )


def _check_memory(request: _LoadRequest, config: Any, dtype: str, n_tokens: int) -> None:
    from flexinspect_hooks.loading.random_weights import count_on_meta

    source = request.source
    is_quantized = getattr(config, "quantization_config", None) is not None
    count = None if is_quantized else count_on_meta(config, trust_remote_code=request.trust)
    plan = model_sizes.plan_memory(
        config.to_dict(),
        dtype=dtype,
        n_tokens=n_tokens,
        n_parameters=count,
        available=placement.free_memory(request.device),
    )
    request.report(
        "plan",
        {
            "name": source.name,
            "place": source.place if request.weights == "pretrained" else "random weights",
            "where": source.where if request.weights == "pretrained" else "random",
            "parameters": count,
            "device": request.device,
            "dtype": dtype,
            "total": plan.total,
            **asdict(plan),
        },
    )
    placement.require_fit(source.name, plan, device=request.device, dtype=dtype)
    if request.weights == "pretrained" and request.device != "cpu":
        # Weights are read into RAM first and then moved to the device.
        staging = model_sizes.MemoryPlan(plan.weights, 0, 0, model_sizes.available_ram())
        placement.require_fit(source.name, staging, device="cpu", dtype=dtype)


def _make_random(request: _LoadRequest, config: Any, dtype: str) -> tuple[Any, Any, str]:
    """Return (model, tokenizer or None, fingerprint) with random weights."""
    from flexinspect_hooks.loading.random_weights import build_random

    model = build_random(
        config,
        device=request.device,
        dtype=dtype,
        seed=request.seed,
        report=request.report,
        trust_remote_code=request.trust,
    )
    fingerprint = fingerprint_random(config.to_dict(), request.seed, dtype)
    return model, _find_tokenizer(request), fingerprint


def _find_tokenizer(request: _LoadRequest) -> Any | None:
    folder = _vocabulary_folder(request.source)
    if folder is None:
        text = "There is no tokenizer on this machine: token ids are shown in place of text."
        request.report("note", {"text": text})
        return None
    return _load_tokenizer(folder, request)


def _vocabulary_folder(source: ModelSource) -> Path | None:
    """Return the folder on this machine with the files of a tokenizer, None without one."""
    folder = source.path
    if folder is None and source.repo_id is not None:
        snapshots = (cached_snapshot(source.repo_id, name) for name in _VOCABULARIES)
        folder = next((snapshot for snapshot in snapshots if snapshot is not None), None)
    return folder if folder is not None and _has_vocabulary(folder) else None


def _load_pretrained(request: _LoadRequest, config: Any, dtype: str) -> tuple[Any, Any, str]:
    """Return (model, tokenizer, fingerprint) with the weights of a folder or the hub."""
    import torch
    from transformers import AutoModelForCausalLM

    source = request.source
    folder = source.path
    needs_tokenizer = request.needs_tokenizer
    if folder is None or (
        needs_tokenizer and source.where == "cached" and not _has_vocabulary(folder)
    ):
        folder = hub_download.fetch_all(source, request.report, code=request.trust)
    _require_weights(folder)
    if needs_tokenizer and not _has_vocabulary(folder):
        raise ModelError(
            f"The model {source.name} has no tokenizer in {folder}.",
            hint="Put its tokenizer.json (and tokenizer_config.json) there, for instance with "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(folder)`; "
            "with --weights random no tokenizer is needed.",
        )
    tokenizer = _load_tokenizer(folder, request) if needs_tokenizer else None
    request.report("reading weights", {"fraction": 0.0})
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=getattr(torch, dtype),
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=request.trust,
        output_loading_info=True,
    )
    _require_all_values(info, folder)
    return model.to(request.device), tokenizer, fingerprint_files(folder)


def _require_weights(folder: Path) -> None:
    files = model_sizes.weight_files(folder)
    missing = [path.name for path in files if not path.exists()]
    if not missing:
        for path in files:
            model_sizes.read_header(path)
        return
    if missing == [model_sizes.SINGLE_FILE]:
        pickles = [*sorted(folder.glob("*.bin")), *sorted(folder.glob("*.pt*"))]
        note = f"; {pickles[0].name} is a pickle, which flexinspect never loads" if pickles else ""
        raise ModelError(
            f"The folder {folder} has no safetensors weights{note}.",
            hint="Convert it where you trust it: load the model there and "
            "`model.save_pretrained(folder, safe_serialization=True)`.",
        )
    raise ModelError(
        f"The folder {folder} is incomplete: {len(missing)} of {len(files)} weight files are "
        f"missing, the first is {missing[0]}.",
        hint="Download the missing files.",
    )


def _has_vocabulary(folder: Path) -> bool:
    return any((folder / name).exists() for name in _VOCABULARIES) or any(folder.glob("*.tiktoken"))


def _load_tokenizer(folder: Path, request: _LoadRequest) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=request.trust
        )
    except Exception as error:
        raise ModelError(
            f"The tokenizer in {folder} cannot be read ({_first_line(error)}).",
            hint="Download its files again; a custom tokenizer needs --trust-remote-code.",
        ) from error


# Files up to this size are read completely; of larger ones evenly spaced samples.
_MAX_WHOLE_FILE = 64 * 2**20
_SAMPLES = 256
_SAMPLE_BYTES = 16 * 1024
_IGNORED_CONFIG_KEYS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
_RANDOM_VERSION = 1  # increase it when `random_weights` computes other values from the same seed


def fingerprint_files(folder: Path) -> str:
    """Return the fingerprint of a folder's safetensors files.

    It covers names, sizes, headers, and the content: all of it up to 64 MiB per file, otherwise 256
    samples of 16 KiB, so that a change of a few values in a large file may not be detected.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in model_sizes.weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= _MAX_WHOLE_FILE:
                while chunk := file.read(2**20):
                    digest.update(chunk)
                continue
            digest.update(file.read(8 + int.from_bytes(file.read(8), "little")))
            for index in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def fingerprint_random(config: Mapping[str, Any], seed: int, dtype: str) -> str:
    """Return the fingerprint of random weights, a hash of configuration, seed and dtype."""
    options = {key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}
    text = json.dumps([_RANDOM_VERSION, seed, dtype, options], sort_keys=True, default=str)
    return "random-" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# -- errors ---------------------------------------------------------------------------------------


def _require_known_architecture(folder: Path, source: ModelSource, *, trusted: bool) -> None:
    """Raise `ModelError` for an unknown architecture, or one with its own code unless trusted."""
    from transformers import CONFIG_MAPPING, __version__

    config = read_config_file(folder / "config.json")
    _check_values(config, source, trusted=trusted)
    kind = config.get("model_type")
    own_code = bool(config.get("auto_map"))
    if kind in CONFIG_MAPPING or (own_code and trusted):
        return
    if own_code:
        raise ModelError(
            f"The model {source.name} has its own Python code (architecture {kind!r}), and "
            "flexinspect does not run remote code by default.",
            hint="Read that code; if you trust it, add --trust-remote-code.",
        )
    raise ModelError(
        f"The architecture {kind!r} of {source.name} is not known to transformers {__version__}."
        if kind
        else f"The configuration in {folder} has no model_type.",
        hint="A newer transformers may know it: pip install -U transformers.",
    )


def _check_values(config: Mapping[str, Any], source: ModelSource, *, trusted: bool) -> None:
    """Raise `ModelError` for a kernel from the hub unless trusted, and for absurd sizes.

    Parts of a model (text, vision) have configurations of their own inside of `config`.
    """
    for name, value in config.items():
        if isinstance(value, dict):
            _check_values(value, source, trusted=trusted)
        elif "attn_implementation" in name and "/" in str(value) and not trusted:
            raise ModelError(
                f"The model {source.name} asks for the attention kernel {value!a} from the hub, "
                "and flexinspect does not run remote code by default.",
                hint="Read that code; if you trust it, add --trust-remote-code.",
            )
        elif "layer" in name and isinstance(value, int) and value > MAX_LAYERS:
            what = f"The configuration of {source.name} is not usable: {name} is {value}."
            raise ModelError(what, hint=f"Models of up to {MAX_LAYERS} layers can be loaded.")


def require_causal_lm(config: Any, source: ModelSource) -> None:
    """Raise `ModelError` if the model is not a causal language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "auto_map", None) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return  # its own code decides
    known: tuple[str, ...] = ()
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        classes = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        classes = classes if isinstance(classes, tuple | list) else (classes,)
        known = tuple(each.__name__ for each in classes)
    declared = config.architectures or known
    if not known or not set(declared) & set(known):
        names = ", ".join(declared) or config.model_type
        raise ModelError(
            f"The model {source.name} ({names}) is not a causal language model.",
            hint="Choose one that generates text from left to right, such as llama3.2_1b_it.",
        )


def _require_all_values(info: Any, folder: Path) -> None:
    """Raise `ModelError` if the loading info of `from_pretrained` has missing parameters."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"The weights in {folder} have no values for {len(missing)} parameters, the first is "
            f"{missing[0]}.",
            hint="The files belong to another configuration; download weights and config.json "
            "together.",
        )


def _explain_load_error(error: Exception, source: ModelSource, device: str) -> ModelError:
    """Return an exception of torch, transformers or safetensors as a `ModelError`."""
    text, line = str(error), _first_line(error)
    if isinstance(error, MemoryError) or is_out_of_memory(text):
        return ModelError(
            f"The memory of {device} ran out while {source.name} was loaded.",
            hint="Choose a smaller model, --dtype bfloat16, another --device, or end other "
            "programs that use memory.",
        )
    if type(error).__name__ == "SafetensorError":
        return ModelError(
            f"The weight files of {source.name} in {source.place} are damaged ({line}).",
            hint="Fetch them again.",
        )
    if isinstance(error, ImportError):
        return ModelError(
            f"The model {source.name} needs a package that is not installed ({line}).",
            hint="Install it, then try again.",
        )
    if "trust_remote_code" in text:
        return ModelError(
            f"The model {source.name} wants to run its own Python code.",
            hint="Read that code; if you trust it, add --trust-remote-code.",
        )
    return ModelError(
        f"The model {source.name} cannot be loaded: {type(error).__name__}: {line}",
        hint="Check config.json and the versions of torch and transformers.",
    )


def _first_line(error: BaseException, limit: int = 200) -> str:
    """Return the first line of an error's text, cut to `limit` characters."""
    lines = str(error).strip().splitlines()
    line = lines[0].strip() if lines else type(error).__name__
    return line if len(line) <= limit else line[: limit - 1] + "…"
