"""What panels are made of: the data they load, the words they say, the pictures they paint.

A module belongs to the panel whose name it begins with; `sequence` and `windows` serve several.
"""
