"""Fixtures that load small real models."""

from support.model_fixtures import home, hub, run_python, tiny_llama

__all__ = ["home", "hub", "run_python", "tiny_llama"]
