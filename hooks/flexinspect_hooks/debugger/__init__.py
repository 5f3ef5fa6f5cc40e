"""Debuggers in the capture process: the debugpy server, pdb, and the frames where they stop.

The modules are loaded only if a debugger was requested or is attached. Only `value_descriptions`
needs torch.
"""
