"""Loading: weights are those of the files, shapes are real, every error has one sentence."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.model_samples import TINY

from flexinspect.core.errors import ModelError
from flexinspect.inputs.model_names import ALIASES, ModelSource, resolve
from flexinspect_hooks.loading import model_loader as loading
from flexinspect_hooks.loading import placement
from flexinspect_hooks.loading.model_loader import LoadedModel, load
from flexinspect_hooks.loading.random_weights import NOISE_BLOCK_SIZE
from flexinspect_hooks.loading.tokenizers import IdTokenizer

TINY_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {},
    "gemma2": {"head_dim": 8},
    "phi3": {"pad_token_id": 0},
    "gpt_neox": {"vocab_size": 320, "hidden_act": "gelu"},
}


def load_cpu(source: ModelSource, **options: Any) -> LoadedModel:
    return load(source, device="cpu", **options)


def assert_refused(source: ModelSource, **options: Any) -> ModelError:
    with pytest.raises(ModelError) as raised:
        load(source, **options)
    assert raised.value.exit_code == 2
    assert "\n" not in raised.value.message
    assert raised.value.hint
    return raised.value


def folder_of(tmp_path: Path, config: Mapping[str, Any]) -> ModelSource:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return resolve(str(tmp_path))


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "copy"))


def test_a_folder_loads_its_model(tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = load_cpu(resolve(str(tiny_llama)))
    twin = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    for (name, ours), (_, theirs) in zip(
        loaded.model.named_parameters(), twin.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.device, loaded.dtype, loaded.n_parameters) == ("cpu", "float32", 28_832)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Paris")) == "Paris"
    assert loaded.config["num_key_value_heads"] == 2
    with pytest.raises(AttributeError):
        loaded.device = "cuda"  # type: ignore[misc]


def test_garbage_is_collected_again_after_loading_also_the_model(tiny_llama: Path) -> None:
    loaded = load_cpu(resolve(str(tiny_llama)))
    assert gc.isenabled()
    assert gc.is_tracked(loaded.model)
    assert any(one is loaded.model for one in gc.get_objects())  # it has no frozen objects
    with pytest.raises(ModelError):
        load_cpu(replace(resolve(str(tiny_llama)), path=tiny_llama / "missing"))
    assert gc.isenabled()


def test_nothing_is_printed_and_phases_are_reported_in_order(
    tiny_llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    phases: list[tuple[str, Mapping[str, Any]]] = []
    load_cpu(resolve(str(tiny_llama)), report=lambda phase, data: phases.append((phase, data)))
    assert capfd.readouterr() == ("", "")
    assert phases[0][0] == "plan"
    assert phases[0][1]["parameters"] == 28_832
    assert phases[0][1]["weights"] == 4 * 28_832
    assert phases[0][1]["available"] > 0
    fractions = [data["fraction"] for phase, data in phases if phase == "reading weights"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert phases[-1][0] == "preparing the first step"


def test_the_verbosity_of_libraries_is_restored(tiny_llama: Path) -> None:
    from transformers.utils import logging

    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    load_cpu(resolve(str(tiny_llama)))
    assert_refused(resolve("llama3.2_1b"), device="cpu", dtype="int4", weights="random")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert logging.set_tqdm_hook(None) is None


def test_the_fingerprint_follows_the_content_and_not_the_place(
    tiny_llama: Path, copy: Path
) -> None:
    first = load_cpu(resolve(str(tiny_llama))).weights_fingerprint
    assert load_cpu(resolve(str(copy))).weights_fingerprint == first
    shard = sorted(copy.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert load_cpu(resolve(str(copy))).weights_fingerprint != first


@pytest.mark.parametrize("kind", TINY_SHAPES)
def test_random_weights_run_and_have_the_library_s_own_buffers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**TINY, **TINY_SHAPES[kind]})
    config.save_pretrained(tmp_path)
    loaded = load_cpu(resolve(str(tmp_path)), weights="random")
    twin = AutoModelForCausalLM.from_config(config)
    ours, theirs = dict(loaded.model.named_buffers()), dict(twin.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in theirs.items():
        assert torch.equal(ours[name], buffer), name
    ids = torch.tensor([loaded.tokenizer_or_ids().encode("the capital")])
    logits = loaded.model(ids).logits
    assert logits.isfinite().all()
    assert logits.std() > 0
    assert (logits[0, 0] != logits[0, 1]).any()


def test_random_matrices_are_normal_and_norms_are_one(tmp_path: Path) -> None:
    config = {"model_type": "llama", **TINY, "hidden_size": 256, "tie_word_embeddings": False}
    model = load_cpu(folder_of(tmp_path, config), weights="random").model
    weight = model.lm_head.weight
    assert weight.mean().abs() < 5e-4
    assert abs(weight.std() - 0.02) < 5e-4
    assert torch.equal(model.model.norm.weight, torch.ones(256))
    assert torch.linalg.matrix_rank(weight) == 256
    assert not torch.equal(weight, model.model.embed_tokens.weight)


def test_random_weights_depend_on_the_seed_and_nothing_else(tmp_path: Path) -> None:
    source = folder_of(tmp_path, {"model_type": "llama", **TINY})
    torch.manual_seed(1)
    first = load_cpu(source, weights="random", seed=3)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = load_cpu(source, weights="random", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    other = load_cpu(source, weights="random", seed=4)
    name = "model.layers.0.self_attn.q_proj.weight"
    first_q, again_q, other_q = (m.model.get_parameter(name) for m in (first, again, other))
    assert torch.equal(first_q, again_q)
    assert not torch.equal(first_q, other_q)
    assert first.weights_fingerprint == again.weights_fingerprint
    assert first.weights_fingerprint != other.weights_fingerprint


def test_tied_embeddings_stay_one_tensor(tmp_path: Path) -> None:
    loaded = load_cpu(folder_of(tmp_path, {"model_type": "llama", **TINY}), weights="random")
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.n_parameters == 28_832


def test_the_block_of_random_numbers_has_a_prime_length() -> None:
    assert all(NOISE_BLOCK_SIZE % divisor for divisor in range(2, int(NOISE_BLOCK_SIZE**0.5) + 1))


@pytest.mark.slow
def test_a_billion_random_parameters_are_created_and_compute() -> None:
    seconds: dict[str, float] = {}
    loaded = load_cpu(
        resolve("llama3.2_1b"),
        weights="random",
        dtype="bfloat16",
        report=lambda phase, data: seconds.update(data) if "seconds" in data else None,
    )
    assert loaded.n_parameters == 1_235_814_400
    assert seconds["seconds"] > 0
    assert loaded.model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_random_weights_without_a_tokenizer_use_ids(tmp_path: Path) -> None:
    notes: list[Any] = []
    loaded = load_cpu(
        folder_of(tmp_path, {"model_type": "llama", **TINY}),
        weights="random",
        report=lambda phase, data: notes.append(data) if phase == "note" else None,
    )
    assert loaded.tokenizer is None
    assert isinstance(loaded.tokenizer_or_ids(), IdTokenizer)
    assert "token ids are shown in place of text" in notes[0]["text"]


def test_random_weights_use_the_tokenizer_of_the_folder(tiny_llama: Path) -> None:
    loaded = load_cpu(resolve(str(tiny_llama)), weights="random")
    assert loaded.tokenizer_or_ids().decode([1]) == "<s>"


def test_too_little_memory_is_refused_with_the_figures_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "available_ram", lambda: 3_000_000_000)
    error = assert_refused(resolve("llama3.2_3b_it"), weights="random", device="cpu")
    for part in ("12.9 GB weights", "float32", "3.0 GB of RAM are free", "2048 tokens"):
        assert part in error.message
    assert "--dtype bfloat16" in str(error.hint)
    assert "flexinspect models" in str(error.hint)


def test_out_of_memory_while_loading_is_an_error_with_the_next_step(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate …")

    monkeypatch.setattr(loading, "_load_pretrained", full)
    assert "memory of cpu ran out" in assert_refused(resolve(str(tiny_llama)), device="cpu").message


def test_a_cut_weight_file_is_damaged(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert f"{shard} is damaged" in assert_refused(resolve(str(copy))).message


def test_a_missing_shard_is_named(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.unlink()
    error = assert_refused(resolve(str(copy)))
    assert "weight files are missing" in error.message
    assert shard.name in error.message


def test_pickled_weights_are_never_loaded(copy: Path) -> None:
    for file in copy.glob("model*"):
        file.unlink()
    (copy / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    error = assert_refused(resolve(str(copy)))
    assert "pytorch_model.bin is a pickle" in error.message
    assert "safe_serialization" in str(error.hint)


def test_weights_that_leave_parameters_without_values_are_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "have no values for 9 parameters" in assert_refused(resolve(str(copy))).message


def test_weights_of_another_shape_are_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    assert_refused(resolve(str(copy)))


def test_a_missing_tokenizer_is_an_error_with_the_next_step(copy: Path) -> None:
    for file in copy.glob("tokenizer*"):
        file.unlink()
    error = assert_refused(resolve(str(copy)))
    assert "has no tokenizer" in error.message
    assert "--weights random" in str(error.hint)


def test_the_missing_tokenizer_of_a_cached_model_is_downloaded(
    copy: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in copy.glob("tokenizer*"):
        file.unlink()
    monkeypatch.setattr(loading.hub_download, "fetch_all", lambda *_args, **_options: tiny_llama)
    cached = replace(resolve(str(copy)), where="cached", repo_id="org/tiny")
    assert load_cpu(cached).tokenizer is not None


def test_a_damaged_tokenizer_is_an_error_with_the_next_step(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{")
    assert "tokenizer in" in assert_refused(resolve(str(copy))).message


def test_an_architecture_that_transformers_does_not_know(tmp_path: Path) -> None:
    error = assert_refused(folder_of(tmp_path, {"model_type": "llama9"}))
    assert "'llama9'" in error.message
    assert "pip install -U transformers" in str(error.hint)


def test_a_configuration_without_a_type(tmp_path: Path) -> None:
    assert "model_type" in assert_refused(folder_of(tmp_path, {"hidden_size": 3})).message


def test_remote_code_does_not_run_by_default(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("raise SystemExit('ran')\n")
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    source = folder_of(tmp_path, {"model_type": "own", "auto_map": auto})
    error = assert_refused(source, weights="random")
    assert "does not run remote code by default" in error.message
    assert "--trust-remote-code" in str(error.hint)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_of_the_hub_does_not_run_by_default(tmp_path: Path, key: str) -> None:
    parts = {"model_type": "llama", "text_config": {key: "some/repo"}, **TINY}
    error = assert_refused(folder_of(tmp_path, parts), weights="random")
    assert "the attention kernel 'some/repo' from the hub" in error.message
    assert "--trust-remote-code" in str(error.hint)


def test_a_configuration_with_a_billion_layers_is_refused_at_once(tmp_path: Path) -> None:
    source = folder_of(tmp_path, {"model_type": "llama", **TINY, "num_hidden_layers": 10**9})
    error = assert_refused(source, weights="random")
    assert "num_hidden_layers is 1000000000" in error.message


def test_remote_code_runs_when_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'own'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    source = folder_of(folder, {"model_type": "own", "auto_map": auto, **TINY})
    loaded = load_cpu(source, weights="random", trust_remote_code=True)
    assert type(loaded.model).__name__ == "Model"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "T5For"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "Llama"),
        ({"model_type": "clip"}, "clip"),
    ],
)
def test_a_model_that_does_not_generate_is_refused(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    error = assert_refused(folder_of(tmp_path, config), weights="random")
    assert "is not a causal language model" in error.message
    assert named in error.message


def test_a_broken_configuration_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in assert_refused(resolve(str(tmp_path))).message


def test_an_impossible_configuration_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    source = folder_of(tmp_path, {"model_type": "llama", **TINY, "hidden_size": "wide"})
    assert "cannot be loaded" in assert_refused(source, weights="random").message


@pytest.mark.parametrize("weights", ["none", "Random"])
def test_unknown_weights_are_refused(weights: str) -> None:
    assert "pretrained or random" in str(
        assert_refused(resolve("llama3.2_1b"), weights=weights).hint
    )


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:0", "tpu"])
def test_an_unknown_device_is_refused(device: str) -> None:
    error = assert_refused(resolve("llama3.2_1b"), weights="random", device=device)
    assert f"{device!r} is unknown" in error.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused_and_auto_uses_the_cpu(tmp_path: Path) -> None:
    source = folder_of(tmp_path, {"model_type": "llama", **TINY})
    error = assert_refused(source, weights="random", device="cuda")
    assert "cuda is not available" in error.message
    assert "--device cpu" in str(error.hint)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is an MPS device")
def test_missing_mps_is_refused() -> None:
    error = assert_refused(resolve("llama3.2_1b"), weights="random", device="mps")
    assert "mps is not available" in error.message


@pytest.mark.parametrize("dtype", ["int4", "float64", ""])
def test_an_unknown_dtype_is_refused(dtype: str) -> None:
    error = assert_refused(resolve("llama3.2_1b"), weights="random", device="cpu", dtype=dtype)
    assert "is unknown" in error.message
    assert "auto" in str(error.hint)


def test_float16_on_a_cpu_is_refused_with_a_hint() -> None:
    error = assert_refused(resolve("llama3.2_1b"), weights="random", device="cpu", dtype="fp16")
    assert "float16 is not usable on the CPU" in error.message
    assert "bfloat16" in str(error.hint)


@pytest.mark.parametrize(
    ("device", "able", "config", "chosen"),
    [
        ("cpu", True, {"dtype": "bfloat16"}, "float32"),
        ("cuda", True, {"torch_dtype": "bfloat16"}, "bfloat16"),
        ("cuda", True, {"dtype": torch.float16}, "float16"),
        ("cuda", True, {}, "bfloat16"),
        ("cuda", False, {"dtype": "bfloat16"}, "float32"),
        ("mps", False, {"dtype": "float16"}, "float16"),
    ],
)
def test_the_automatic_dtype_is_the_checkpoint_s_where_the_device_can(
    monkeypatch: pytest.MonkeyPatch, device: str, able: bool, config: Any, chosen: str
) -> None:
    monkeypatch.setattr(placement, "_has_bfloat16", lambda _device: able)
    assert placement.choose_dtype("auto", device, config) == chosen


def test_bfloat16_on_a_device_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_has_bfloat16", lambda _device: False)
    with pytest.raises(ModelError, match="cannot compute in bfloat16"):
        placement.choose_dtype("bf16", "cuda", {})


def test_the_dtype_of_an_alias_is_used_unless_a_flag_overrides_it(tmp_path: Path) -> None:
    source = folder_of(tmp_path, {"model_type": "llama", **TINY})
    source = replace(source, dtype="bfloat16")
    assert load_cpu(source, weights="random").dtype == "bfloat16"
    loaded = load_cpu(source, weights="random", dtype="float32")
    assert loaded.model.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("alias", ALIASES)
def test_every_shipped_architecture_is_a_causal_language_model(alias: str) -> None:
    from transformers import AutoConfig

    from flexinspect_hooks.loading.model_loader import require_causal_lm

    path = resolve(alias).config_path
    assert path is not None
    config = json.loads(path.read_text())
    require_causal_lm(AutoConfig.for_model(config.pop("model_type"), **config), resolve(alias))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_weights_on_a_gpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    source = folder_of(tmp_path, {"model_type": "llama", **TINY})
    gpu = load(source, weights="random", device="cuda", dtype="float32").model
    cpu = load_cpu(source, weights="random").model
    for (name, ours), (_, theirs) in zip(
        gpu.named_parameters(), cpu.named_parameters(), strict=True
    ):
        assert torch.equal(ours.cpu(), theirs), name
    assert gpu(torch.tensor([[5, 6]], device="cuda")).logits.isfinite().all()
