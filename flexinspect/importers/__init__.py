"""Dumps of other tools as traces: what they do not hold is marked as unknown.

An importer is a plug-in of the group `flexinspect.importers`. It recognizes a dump by its content
and yields the forward passes that it holds; `trace_builder` turns these into a trace.
"""
