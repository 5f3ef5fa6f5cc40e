"""The rules that report findings: step records in, findings out. One package per family, no I/O."""
