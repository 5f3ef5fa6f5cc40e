"""Small real models and prompts that several tests use."""
