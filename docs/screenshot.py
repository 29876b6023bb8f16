"""Take the README's pictures of the Prefect UI in headless Chromium.

    make up && python -m docs.screenshot

Needs Debian's `chromium`; nothing but loopback is visited.
"""

import argparse
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
IMAGES = Path(__file__).resolve().parent / "images"
WIDTH, HEIGHT = 1500, 1600
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def take(page: Page, url: str, name: str, *, settle_seconds: float) -> None:
    """Open a page of the UI, give its requests time to end, and save what it shows."""
    page.goto(url, wait_until="load")
    page.wait_for_timeout(settle_seconds * 1000)
    page.screenshot(path=IMAGES / f"{name}.png")
    print(IMAGES / f"{name}.png")


def main() -> int:
    """Take the pictures."""
    parser = argparse.ArgumentParser(prog="python -m docs.screenshot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=4200, help="port of the Prefect UI")
    parser.add_argument("--run", help="id of a flow run to show as well")
    arguments = parser.parse_args()
    if not CHROMIUM.exists():
        print(f"{CHROMIUM} is missing: apt-get install chromium", file=sys.stderr)
        return 1
    base = f"http://127.0.0.1:{arguments.port}"
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        take(page, f"{base}/runs", "runs", settle_seconds=6)
        if arguments.run:
            take(page, f"{base}/runs/flow-run/{arguments.run}", "window", settle_seconds=6)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
