"""Makes docs/pictures/page.png: the gateway's page before a real stack under load.

    python -m tools.page_picture [--output docs/pictures/page.png] [--listen 127.0.0.1:50050]
        [--http 127.0.0.1:8000] [--chromium /usr/bin/chromium]

Starts two CPU workers with an emulated link and a gateway, sends requests whose beginnings repeat,
and meanwhile lets a headless Chromium continue a prompt twice: the other requests have taken its
pages on the device by then, so that the second time it is restored. Takes a minute. Needs
playwright, which `dev` brings, and a Chromium.
"""

from __future__ import annotations

import argparse
import inspect
import shutil
import sys
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tools.terminal_pictures import load, stack

WARM_UP_SECONDS = 12.0
# Until the first answer has left the device.
PAUSE_SECONDS = 15.0
MILLISECONDS = 60_000.0
WIDTH, HEIGHT, SCALE = 1280, 900, 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/pictures/page.png"))
    parser.add_argument("--listen", default="127.0.0.1:50050")
    parser.add_argument("--http", default="127.0.0.1:8000")
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--theme", choices=["light", "dark"], default="light")
    arguments = parser.parse_args()
    options = (
        *("--http", arguments.http, "--instance", "page", "--link-rate", "450MB"),
        *("--device-memory", "96MiB", "--host-memory", "384MiB", "--activations", "always"),
    )
    with (
        stack(arguments.listen, *options),
        load(arguments.listen),
        sync_playwright() as play,
    ):
        browser = play.chromium.launch(
            executable_path=arguments.chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT},
            device_scale_factor=SCALE,
            color_scheme=arguments.theme,
        )
        page.goto(f"http://{arguments.http}/")
        time.sleep(WARM_UP_SECONDS)
        converse(page)
        page.screenshot(path=arguments.output)
        browser.close()
    sys.stdout.write(f"{arguments.output}\n")


def converse(page: Page) -> None:
    """Let the page continue a module's source, wait, and continue what came."""
    page.get_by_text("Prompt", exact=True).click()
    page.locator("#settings summary").click()
    for name, value in (("max_tokens", "72"), ("temperature", "0.7"), ("seed", "5")):
        page.locator(f"#{name}").fill(value)
    page.locator("#settings summary").click()
    page.locator("#prompt").fill(inspect.getsource(shutil)[:5200].rpartition("\n")[0] + "\n")
    page.keyboard.press("Enter")
    page.locator(".plan").first.wait_for(timeout=MILLISECONDS)
    time.sleep(PAUSE_SECONDS)
    page.get_by_text("Go on from here").click()
    page.locator(".plan").nth(1).wait_for(timeout=MILLISECONDS)
    time.sleep(1.0)


if __name__ == "__main__":
    main()
