"""Debuggers in the capture process: debugpy's server, pdb, and where they stop.

Nothing here is loaded unless a debugger was asked for or is there, and nothing but
`presentation` and `pictures` needs torch.
"""
