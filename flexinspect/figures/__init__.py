"""Pictures for papers and talks, drawn with matplotlib: masks, their generation, the flowchart."""
