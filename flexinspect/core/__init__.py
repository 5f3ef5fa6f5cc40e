"""What every package may import: errors, text helpers, plug-ins, keys, signals, environment."""

__version__ = "0.1.0.dev0"
