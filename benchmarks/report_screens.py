"""Take pictures of a report, to be looked at: wide and narrow, light and dark, whole or in pages.

    python -m benchmarks.report_screens REPORT.html [OUT_DIRECTORY]

The browser is the CHROMIUM variable's, else the first that the path knows; it runs without network use of its own.
"""

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=5000",
)  # fmt: skip
DARK = "--blink-settings=preferredColorScheme=0"
TIMEOUT_S = 120
FRAME = """<!doctype html><title>none</title>
<iframe id="f" style="border:0;width:{width}px;height:2000px" srcdoc="{page}"></iframe>
<script>onload = () => {{ document.title = document.getElementById("f").contentDocument.documentElement.scrollWidth }}</script>"""
"""A page inside a frame of any width: a browser's own window has a least width."""


@dataclass(frozen=True)
class Screen:
    """One picture: the window in CSS pixels, and the theme that the reader's system asks for."""

    name: str
    width: int
    height: int
    dark: bool = False


SCREENS = (
    Screen("wide-light", 1200, 9000),
    Screen("narrow-light", 390, 16000),
    Screen("wide-dark", 1200, 9000, dark=True),
    Screen("narrow-dark", 390, 16000, dark=True),
)


def find_browser() -> str:
    """Return the browser's command.

    Raises:
        SystemExit: none is installed.
    """
    named = os.environ.get("CHROMIUM")
    found = named or next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        sys.exit(f"no browser: none of {', '.join(BROWSERS)} is installed; set CHROMIUM to one")
    return found


def take(browser: str, report: Path, screen: Screen, target: Path) -> None:
    """Write one picture of a report; the browser forgets everything afterwards."""
    with tempfile.TemporaryDirectory() as profile:
        options = [f"--user-data-dir={profile}", f"--window-size={screen.width},{screen.height}", f"--screenshot={target}"]
        theme = [DARK] if screen.dark else []
        command = [browser, *FLAGS, *theme, *options, report.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if not target.exists():
        sys.exit(f"{browser} wrote no picture of {report} (exit {done.returncode}): {done.stderr.strip()[-300:]}")


def sideways_px(browser: str, report: Path, screen: Screen) -> int:
    """Return by how much the page is wider than its window; what scrolls inside its own box does not count."""
    page = html.escape(report.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        outer = Path(folder, "frame.html")
        outer.write_text(FRAME.format(width=screen.width, page=page), encoding="utf-8")
        command = [browser, *FLAGS, f"--user-data-dir={folder}/profile", "--window-size=1400,2000", "--dump-dom", outer.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    found = re.search(r"<title>(\d+)</title>", shown)
    if found is None:
        sys.exit(f"{browser} did not say how wide {report} is")
    return int(found[1]) - screen.width


def main(arguments: list[str]) -> None:
    """Take the four pictures of a report."""
    if len(arguments) not in (1, 2) or not Path(arguments[0]).is_file():
        sys.exit("usage: python -m benchmarks.report_screens REPORT.html [OUT_DIRECTORY]")
    report, out = Path(arguments[0]), Path(arguments[1] if len(arguments) == 2 else "screens")
    browser = find_browser()
    out.mkdir(parents=True, exist_ok=True)
    for screen in SCREENS:
        target = out.resolve() / f"{screen.name}.png"
        target.unlink(missing_ok=True)
        take(browser, report, screen, target)
        beyond = sideways_px(browser, report, screen)
        print(f"{target}  {target.stat().st_size / 1e3:.0f} kB, {f'{beyond} px TOO WIDE' if beyond > 0 else 'fits its window'}")


if __name__ == "__main__":
    main(sys.argv[1:])
