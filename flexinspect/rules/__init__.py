"""What flexinspect says by itself: records in, findings out. One file per family, no I/O."""
