"""Makes the pictures of the README, docs/report-light.png and docs/report-dark.png, from a report.

    cuflash report -o report.html && python -m bench.screenshot report.html

Needs a Chromium on PATH and Pillow (which comes with matplotlib). The page is cut after its first
picture, photographed in both colour schemes and trimmed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SCHEMES = {"dark": 0, "light": 1}  # Blink's PreferredColorScheme
WIDTH, HEIGHT, MARGIN = 1200, 3200, 32
MAX_BYTES = 300_000
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def photograph(browser: str, page: Path, scheme: str, target: Path) -> None:
    """A picture of the page, WIDTH x HEIGHT, by a browser with an empty profile."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            *FLAGS,
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            f"--user-data-dir={profile}",
            f"--window-size={WIDTH},{HEIGHT}",
            f"--screenshot={target}",
            page.resolve().as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def head_of(html: str) -> str:
    """The page up to its first picture, which stays a valid page."""
    end = html.index("</figure>") + len("</figure>")
    return html[:end] + html[html.index("</main>") :]


def trimmed(picture: Image.Image) -> Image.Image:
    """Without the empty page below, but for a margin."""
    picture = picture.convert("RGB")
    empty = Image.new("RGB", picture.size, picture.getpixel((0, picture.height - 1)))
    box = ImageChops.difference(picture, empty).getbbox()
    bottom = picture.height if box is None else min(picture.height, box[3] + MARGIN)
    # Six bits a channel: no visible difference, a fifth less to load.
    return picture.crop((0, 0, picture.width, bottom)).point(
        [min(255, (v + 2) // 4 * 4) for v in range(256)] * 3
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="README pictures from a report")
    parser.add_argument("report", type=Path, help="HTML written by `cuflash report`")
    parser.add_argument("--into", type=Path, default=Path(__file__).parents[1] / "docs")
    args = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"no browser on PATH: looked for {', '.join(BROWSERS)}", file=sys.stderr)
        return 2
    args.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "head.html"
        page.write_text(head_of(args.report.read_text("utf-8")), "utf-8")
        for scheme in SCHEMES:
            shot = Path(folder) / f"{scheme}.png"
            photograph(browser, page, scheme, shot)
            target = args.into / f"report-{scheme}.png"
            with Image.open(shot) as picture:
                trimmed(picture).save(target, optimize=True)
            size = target.stat().st_size
            print(f"{target}: {size} bytes")
            if size > MAX_BYTES:
                print(f"{target}: larger than {MAX_BYTES} bytes", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
