"""Take the pictures of the Prefect UI in headless Chromium.

    make up && python -m docs.screenshot

Needs Debian's `chromium`; nothing but loopback is visited. The pictures are reduced to a few colours, which keeps each
below 200 kB.
"""

import argparse
import io
import sys
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
IMAGES = Path(__file__).resolve().parent / "images"
WIDTH, HEIGHT = 1400, 1000
COLOURS = 48
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pages_of(base: str, neuron: str, run: str | None) -> dict[str, str]:
    """Name of each picture -> what it shows: runs, automations, the network's page, a neuron's block, a window."""
    with httpx.Client(base_url=f"{base}/api", trust_env=False) as client:
        (network, *_) = client.post("/artifacts/filter", json={"artifacts": {"key": {"like_": "network-"}}}).json()
        block = client.get(f"/block_types/slug/neuron/block_documents/name/{neuron}").json()
    found = {"runs": "/runs", "automations": "/automations", "block": f"/blocks/block/{block['id']}"}
    found["training"] = f"/artifacts/artifact/{network['id']}"
    return found | ({"window": f"/runs/flow-run/{run}"} if run else {})


def take(page: Page, url: str, name: str, *, settle_seconds: float) -> None:
    """Open a page of the UI, give its requests time to end, and save what it shows."""
    page.goto(url, wait_until="load")
    page.wait_for_timeout(settle_seconds * 1000)
    target = IMAGES / f"{name}.png"
    with Image.open(io.BytesIO(page.screenshot())) as picture:
        picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)
    print(target)


def main() -> int:
    """Take the pictures."""
    parser = argparse.ArgumentParser(prog="python -m docs.screenshot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=4200, help="port of the Prefect UI")
    parser.add_argument("--neuron", default="default", help="the neuron whose block is shown")
    parser.add_argument("--run", help="id of a flow run to show as well")
    parser.add_argument("--page", metavar="URL", help="the network's page in a bucket, to show as well")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="take these pictures alone")
    arguments = parser.parse_args()
    if not CHROMIUM.exists():
        print(f"{CHROMIUM} is missing: apt-get install chromium", file=sys.stderr)
        return 1
    base = f"http://127.0.0.1:{arguments.port}"
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        shown = {name: f"{base}{path}" for name, path in pages_of(base, arguments.neuron, arguments.run).items()}
        shown |= {"page": arguments.page} if arguments.page else {}
        for name, url in shown.items():
            if not arguments.only or name in arguments.only:
                take(page, url, name, settle_seconds=10)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
