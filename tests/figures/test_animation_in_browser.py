"""The page of an animation in headless Chromium: its keys, and playing to the end."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.mask_pictures import isolation_picture

from flexinspect.core.languages import load_labels
from flexinspect.figures.animation import save_animation
from flexinspect.figures.mask_figure import FigureStyle

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
KEYS = """<script>
const log = [];
const note = () => log.push(document.body.dataset.frame + byId("play").textContent);
const press = (key) => {
  document.dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));
  note();
};
setTimeout(() => {
  note();
  for (const key of ["End", "ArrowLeft", "ArrowRight", "ArrowRight", "Home", "ArrowLeft", " "])
    press(key);
  setTimeout(() => {
    note();
    document.body.insertAdjacentHTML("beforeend", `<pre id="log">${log.join(" ")}</pre>`);
  }, 3000);
}, 300);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_keys_step_and_play_stops_at_the_last_step(tmp_path: Path) -> None:
    style = FigureStyle(labels=load_labels("en"), width=3)
    file = save_animation(isolation_picture(2, 4, 1, 3), tmp_path / "a.html", style=style)
    file.write_text(file.read_text("utf-8").replace("</body>", KEYS), "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    page = f"file://{file}#paused"
    done = subprocess.run(
        [str(CHROMIUM), *flags, "--virtual-time-budget=8000", "--dump-dom", page],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    logged = re.findall(r'<pre id="log">([^$]*?)</pre>', done.stdout)[-1]
    assert logged.split() == [
        *("0Play", "3Play", "2Play", "3Play", "3Play", "0Play", "0Play", "0Pause", "3Play")
    ]
    assert "step 3: query 11" in done.stdout
