"""Make the README's picture of the page: `smollm2`, its drafter, a link of 30 ms and the daemon, in one process but for
the link.

    .venv/bin/python tests/edge/daemon_page/picture.py docs/figures/page.png
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from pathlib import Path

from playwright.async_api import async_playwright

from outrider.cloud.models.family_index import find_target
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.link.link_process import LinkProcess
from outrider.deploy.link.shape import LinkShape
from outrider.edge import Client, EdgeConfig
from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.http_server import Daemon

PROMPT = "Give me three tips for sleeping well."
FIRST = "Why is the sky blue?"
SETTINGS = {"temperature": "0", "max-tokens": "160"}
LINK = LinkShape.of(rtt_ms=30, up_mbit=20, down_mbit=100)


async def picture(file: Path, prompt: str, scheme: str, marks: str, width: int) -> None:
    """Photograph the answer to `prompt` on a page whose daemon and target are set up here."""
    target = Path(find_target("smollm2"))
    verifier = VerifierServer(VerifierConfig(target="smollm2", threads=1))
    async with LinkProcess(to=await verifier.start(), shape=LINK) as link:
        edge = EdgeConfig(
            verifier=link.address,
            model="smollm2",
            drafter="smol",
            tokenizer=target / "tokenizer.json",
            chat_template=target / "chat_template.jinja",
        )
        daemon = Daemon(DaemonConfig(listen="127.0.0.1:0", grace_s=0), Client(edge))
        await photograph(await daemon.start(), file, prompt, scheme, marks, width)
        await daemon.stop()
    await verifier.stop(0)


async def photograph(url: str, file: Path, prompt: str, scheme: str, marks: str, width: int) -> None:
    """Ask `prompt` in headless Chromium and write a picture of the answer to `file`."""
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        await page.goto(url)
        await page.wait_for_selector("#health[data-state=ok]", timeout=60_000)
        await page.click("#settings-button")
        for field, value in SETTINGS.items():
            await page.fill(f"#{field}", value)
        await page.click("#settings-close")
        await page.click(f".segments label:has([value={marks}])")
        for question in (FIRST, prompt):  # the first text teaches the policies what they measure
            await page.fill("#prompt", question)
            await page.press("#prompt", "Enter")
            await page.wait_for_selector("[aria-busy=false] >> nth=-1", timeout=120_000)
            await page.wait_for_selector("#send:visible", timeout=120_000)
            if question != prompt:
                await page.click("#new-chat")
        await page.locator("#prompt").blur()
        await page.wait_for_timeout(500)  # bars glide to their end
        await page.screenshot(path=file)
        await browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--marks", choices=("on", "subtle", "off"), default="subtle")
    parser.add_argument("--width", type=int, default=1280)
    options = parser.parse_args()
    asyncio.run(picture(options.file, options.prompt, options.scheme, options.marks, options.width))
