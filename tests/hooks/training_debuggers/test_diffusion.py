"""`DiffusionModelDebugger`, on a small pipeline that really denoises."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexinspect import DebugLevel, DiffusionModelDebugger
from flexinspect.core.errors import UsageError


class TextEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.block(self.embed(ids)))


class UNet(nn.Module):
    """Two convolutions, conditioned on the time and the text by cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(4, 16, 3, padding=1)
        self.time = nn.Linear(1, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, latents: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Any:
        x = self.down(latents) + self.time(timestep.float().view(-1, 1))[:, :, None, None]
        rows = x.flatten(2).transpose(1, 2)
        rows = rows + self.attend(rows, encoder_hidden_states, encoder_hidden_states)[0]
        return SimpleNamespace(sample=self.up(rows.transpose(1, 2).reshape(x.shape).tanh()))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ConvTranspose2d(4, 3, 2, stride=2)

    def forward(self, latents: Tensor) -> Tensor:
        return self.decoder(latents)


class Scheduler:
    """Euler steps from t = 1 to 0."""

    timesteps: tuple[float, ...] = ()

    def set_timesteps(self, steps: int) -> None:
        self.timesteps = tuple(1 - step / steps for step in range(steps))

    def step(self, noise: Tensor, latents: Tensor) -> Tensor:
        return latents - noise / len(self.timesteps)


class Pipeline:
    """Parts as attributes, as in a pipeline of diffusers."""

    def __init__(self, denoiser: str = "unet") -> None:
        torch.manual_seed(0)
        setattr(self, denoiser, UNet())
        self.text_encoder, self.text_encoder_2, self.vae = TextEncoder(), TextEncoder(), VAE()
        self.scheduler, self.tokenizer, self.safety_checker = Scheduler(), str.split, None


def parameters(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


@torch.no_grad()
def denoise(pipeline: Any, debugger: Any, steps: int = 6, corrupt: Any = None) -> list[Any]:
    torch.manual_seed(1)
    latents = torch.randn(1, 4, 8, 8)
    hidden = pipeline.text_encoder(torch.arange(7)[None]).last_hidden_state
    pipeline.scheduler.set_timesteps(steps)
    found = []
    for step, t in enumerate(pipeline.scheduler.timesteps):
        timestep = torch.tensor([t])
        noise = pipeline.unet(latents, timestep, encoder_hidden_states=hidden).sample
        latents = pipeline.scheduler.step(noise, latents)
        if corrupt is not None:
            latents = corrupt(step, latents)
        found.append(debugger.monitor_diffusion_step(pipeline, step, latents))
    return found


def test_the_parts_and_all_parameters_of_a_pipeline_are_counted() -> None:
    pipeline = Pipeline()
    analysis = DiffusionModelDebugger(DebugLevel.BASIC).analyze_diffusion_pipeline(pipeline)
    modules = [pipeline.unet, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.vae]  # type: ignore[attr-defined]
    assert analysis["total_parameters"] == analysis.total_parameters == parameters(*modules)
    assert {name: part.parameters for name, part in analysis.components.items()} == {
        "unet": parameters(pipeline.unet),  # type: ignore[attr-defined]
        "text_encoder": parameters(pipeline.text_encoder),
        "text_encoder_2": parameters(pipeline.text_encoder),
        "vae": parameters(pipeline.vae),
    }
    assert analysis.memory == 4 * analysis.total_parameters
    assert analysis.components["unet"].kind == "UNet"
    assert analysis.problems == ()


@pytest.mark.parametrize("denoiser", ["unet", "transformer"])
def test_the_roles_of_the_parts_are_reported(denoiser: str) -> None:
    analysis = DiffusionModelDebugger().analyze_diffusion_pipeline(Pipeline(denoiser))
    assert analysis.roles == {
        "denoiser": (denoiser,),
        "text encoder": ("text_encoder", "text_encoder_2"),
        "vae": ("vae",),
    }


def test_the_mapping_components_is_read_where_a_pipeline_has_one() -> None:
    parts = {"unet": UNet(), "vae": VAE(), "scheduler": Scheduler()}
    pipeline = SimpleNamespace(components=parts, other=nn.Linear(1000, 1000))
    analysis = DiffusionModelDebugger().analyze_diffusion_pipeline(pipeline)
    assert list(analysis.components) == ["unet", "vae"]


def test_weights_that_are_not_finite_and_mixed_dtypes_are_problems() -> None:
    pipeline, debugger = Pipeline(), DiffusionModelDebugger()
    pipeline.vae.half()
    with torch.no_grad():
        pipeline.text_encoder.embed.weight[3, 3] = math.nan
    analysis = debugger.analyze_diffusion_pipeline(pipeline)
    assert analysis.problems == (
        "NaN in the weights of text_encoder.",
        "The weights are of several dtypes: float16, float32.",
    )
    assert debugger.get_debug_summary().total_anomalies == 2


def test_an_object_without_modules_is_refused() -> None:
    with pytest.raises(UsageError, match="The SimpleNamespace has no module"):
        DiffusionModelDebugger().analyze_diffusion_pipeline(SimpleNamespace(unet=1))


@pytest.mark.parametrize("level", list(DebugLevel))
def test_a_correct_image_has_no_anomaly(level: DebugLevel) -> None:
    debugger = DiffusionModelDebugger(level)
    found = denoise(Pipeline(), debugger) + denoise(Pipeline(), debugger)
    assert [one.step for one in found] == [0, 1, 2, 3, 4, 5] * 2
    assert all(one.anomalies == () for one in found)
    assert debugger.get_debug_summary().total_anomalies == 0
    is_advanced = level is not DebugLevel.BASIC
    assert [one.change is not None for one in found] == ([False] + [is_advanced] * 5) * 2
    assert all((one.memory is not None) == is_advanced for one in found)
    assert all((one.latents.std is not None) == is_advanced for one in found)


def test_the_change_is_how_far_the_latents_moved() -> None:
    debugger, pipeline = DiffusionModelDebugger(DebugLevel.ADVANCED), Pipeline()
    latents = torch.randn(1, 4, 8, 8)
    debugger.monitor_diffusion_step(pipeline, 0, latents)
    latents *= 1.5  # in place: what was before must not move along
    info = debugger.monitor_diffusion_step(pipeline, 1, latents)
    assert info.change == pytest.approx(0.5)


def test_nan_is_found_at_the_first_bad_step() -> None:
    debugger = DiffusionModelDebugger(DebugLevel.BASIC)
    found = denoise(Pipeline(), debugger, corrupt=lambda step, x: x * math.nan if step == 3 else x)
    bad = [one.step for one in found if one.anomalies]
    assert bad == [3, 4, 5]
    assert found[3].anomalies[0].sentence.startswith("NaN in latents of step 3 ")


def test_a_jump_of_the_spread_is_found_from_advanced_on() -> None:
    for level, kinds in ((DebugLevel.BASIC, []), (DebugLevel.ADVANCED, ["jump"])):
        debugger = DiffusionModelDebugger(level)
        found = denoise(Pipeline(), debugger, corrupt=lambda step, x: x * 20 if step == 2 else x)
        assert [one.kind for one in found[2].anomalies] == kinds
        assert all(found[step].anomalies == () for step in (0, 1, 3, 4, 5))


@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_the_part_that_makes_the_nan_is_named_under_watching(part: str) -> None:
    pipeline, debugger = Pipeline(), DiffusionModelDebugger()
    with torch.no_grad():
        next(getattr(pipeline, part).parameters()).fill_(math.nan)
    with debugger.watching(pipeline):
        found = denoise(pipeline, debugger, steps=2)
    assert found[0].made_by == part
    assert found[0].anomalies[0].sentence.endswith(f"First made by {part}.")
    assert found[1].made_by == "unet (from non-finite inputs)"
    assert not any(
        len(m._forward_hooks) for m in vars(pipeline).values() if isinstance(m, nn.Module)
    )


def test_the_history_is_bounded_and_cleared() -> None:
    debugger = DiffusionModelDebugger(DebugLevel.EXTREME, history=4)
    denoise(Pipeline(), debugger)
    assert debugger.get_debug_summary().debug_history_length == 4
    debugger.clear_debug_history()
    assert debugger.get_debug_summary().debug_history_length == 0
