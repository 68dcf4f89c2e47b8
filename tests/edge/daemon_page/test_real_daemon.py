"""The page in a real browser, on a real daemon with a real drafter and a real verifier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from loop_thread import LoopThread

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install --group dev")
from playwright.sync_api import expect


@dataclass
class Real:
    """A daemon's URL, and its verifier."""

    url: str
    verifier: object


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    from outrider.cloud.models.family_index import target_folder, tokenizer_file
    from outrider.cloud.serving.verifier_server import VerifierServer
    from outrider.cloud.verifier_config import VerifierConfig
    from outrider.edge import Client, EdgeConfig
    from outrider.edge.daemon import DaemonConfig
    from outrider.edge.daemon.http_server import Daemon

    loop = LoopThread()
    verifier = VerifierServer(VerifierConfig(threads=1))
    target = target_folder("reference")

    async def start() -> tuple[Daemon, str]:
        edge = EdgeConfig(
            verifier=await verifier.start(),
            model="reference",
            drafter="general",
            tokenizer=tokenizer_file(target),
            chat_template=target / "chat_template.jinja",
        )
        daemon = Daemon(DaemonConfig(listen="127.0.0.1:0", grace_s=0), Client(edge))
        return daemon, await daemon.start()

    async def stop() -> None:
        await daemon.stop()
        await verifier.stop(0)

    daemon, url = loop.run(start())
    yield Real(url, verifier)
    loop.run(stop())
    loop.close()


@pytest.fixture
def page(browser, real):
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.goto(real.url)
    expect(page.locator("#health")).to_have_attribute("data-state", "ok", timeout=30_000)
    yield page
    page.close()


def test_a_text_streams_with_both_kinds_of_tokens_and_the_panels_fill(page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("48")
    page.get_by_role("button", name="Close").click()
    page.get_by_text("In detail").click()
    page.get_by_label("Message", exact=True).fill(
        "Tom has 12 apples and buys 3 bags of 8 apples each. How many apples has he?"
    )
    page.get_by_label("Message", exact=True).press("Enter")
    answer = page.locator(".message.answer")
    expect(answer.locator(".foot")).to_contain_text("target steps", timeout=60_000)
    assert answer.locator(".token.draft").count() > 0
    assert answer.locator(".token.own").count() > 0
    assert answer.locator(".token.unknown").count() == 0
    expect(page.locator("#model")).to_have_value("reference")
    expect(page.locator("#drafter")).to_have_text("general")
    for metric in (
        "rate",
        "cloud-rate",
        "acceptance",
        "steps",
        "steps-count",
        "window",
        "round-trip",
        "uplink",
        "downlink",
    ):
        assert any(letter.isdigit() for letter in page.locator(f"#{metric}").text_content()), metric


def test_stop_frees_the_session_at_the_verifier(page, real) -> None:
    real.verifier.set_pace(0.2)  # or a text may end before it is stopped
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("1500")
    page.get_by_role("button", name="Close").click()
    page.get_by_label("Message", exact=True).fill("Once upon a time")
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.locator(".message.answer .token").first).to_be_visible(timeout=60_000)
    page.keyboard.press("Escape")
    expect(page.locator(".message.answer .foot")).to_contain_text("stopped")
    for _ in range(200):
        if not real.verifier.status().sessions:
            break
        page.wait_for_timeout(50)
    assert real.verifier.status().sessions == 0
    real.verifier.set_pace(0.0)
