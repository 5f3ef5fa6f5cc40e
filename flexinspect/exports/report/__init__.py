"""`flexinspect report`: a recorded run as one HTML file that opens offline in any browser.

`collect` reads a trace into the structs of `contents`, `size_budget` leaves out what does not fit,
`page` writes the HTML. The script and the style of the page are plain files in `assets`.
"""
