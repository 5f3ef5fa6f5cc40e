"""Traces as files of other tools: an HTML report, Perfetto, TensorBoard, tables, a notebook."""
