"""What every other package may use: errors, text, plug-ins, keys, signals, the machine."""

__version__ = "0.1.0.dev0"
