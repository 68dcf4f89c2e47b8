"""The page in a real browser, against a scripted daemon."""

# ruff: noqa: RUF001 - the page shows such signs

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest
from starlette.responses import JSONResponse

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install --group dev")
from playwright.sync_api import expect

from outrider.proto.cluster_status import VersionStatus

HOSTILE = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'


def look_again(page):
    """The page asks for the daemon's health when its tab comes to the front."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def refusal(status, message, headers=None, **error):
    return JSONResponse({"error": {"message": message, **error}}, status, headers)


def test_drafts_and_the_targets_own_tokens_differ_in_colour_and_in_another_sign(page, daemon, ask) -> None:
    page.get_by_text("Marks on").click()
    ask()
    answer = page.locator(".message.answer .text")
    expect(answer).to_have_text("Once upon a time")
    expect(answer.locator(".draft")).to_have_text("upon a time")
    expect(answer.locator(".own")).to_have_text(["Once"])
    style = "e => {const s = getComputedStyle(e); return [s.color, s.backgroundColor, s.textDecorationLine]}"
    drafted, own = (answer.locator(kind).first.evaluate(style) for kind in (".draft", ".own"))
    assert all(one != other for one, other in zip(drafted, own, strict=True))
    expect(page.get_by_role("note")).to_contain_text("accepted by the target")


def test_versions_are_listed_where_a_drafter_has_several_with_what_decided_on_them(page, daemon) -> None:
    expect(page.locator("#versions-card")).to_be_hidden()
    version = VersionStatus("general", "1" * 12, "current", 1.0, acceptance=0.70, trials=900.0)
    previous = replace(version, version="2" * 40, state="previous", share=0.1)
    current = replace(version, against="2" * 40, texts=31, difference=0.0123)
    retired = VersionStatus("general", HOSTILE[:30], "retired", why="hits -0.121 against 111111111111 in 12 texts")
    daemon.versions = [asdict(each) for each in (replace(version, drafter="code"), current, previous, retired)]
    look_again(page)
    expect(page.locator("#versions-card")).to_be_visible()
    expect(page.locator("#versions tr:not(.why)")).to_have_count(3)
    rows = page.locator("#versions tr")
    expect(rows.nth(0)).to_have_text("general 111111111111current70 %")
    expect(rows.nth(1)).to_have_text("hits +0.012 against 222222222222 in 31 texts so far")
    expect(rows.nth(2)).to_have_text("general 222222222222previous, 10 % of edges70 %")
    expect(rows.nth(3)).to_contain_text(f"general {HOSTILE[:12]}retired")
    expect(rows.nth(4)).to_have_text("hits -0.121 against 111111111111 in 12 texts")
    assert page.title() != "owned"
    daemon.versions = [asdict(version)]
    look_again(page)
    expect(page.locator("#versions-card")).to_be_hidden()


def test_the_panels_say_what_the_daemon_says(page, daemon, ask) -> None:
    daemon.pieces = [("la ", True)] * 20
    ask()
    expect(page.locator("#ratio")).to_have_text("2.40×")
    for metric, text in {
        "rate": "48.0 tok/s",
        "cloud-rate": "20.0 tok/s",
        "acceptance": "75 %",
        "window": "7 now, 7 at most",
        "drafter": "general",
        "round-trip": "42.5 ms",
        "uplink": "20 B",
        "downlink": "30 B",
        "steps": "0.50",
        "steps-count": "10",
        "tokens-count": "20",
        "target": "reference",
        "plain": "20 tokens, of which 10 cost no step of their own: "
        "they were guessed on this machine, and the model agreed.",
    }.items():
        expect(page.locator(f"#{metric}")).to_have_text(text)
    expect(page.locator("#speed-chart .line.here")).to_have_count(1)
    expect(page.locator(".message.answer .foot")).to_have_text(
        "20 tokens in 10 target steps · 48.0 tok/s · 2.40× cloud alone"
    )


def test_empty_lines_before_an_answer_are_not_shown_but_stay_in_the_conversation(page, daemon, ask) -> None:
    daemon.pieces = [("\n\n", False), (" Once", True)]
    ask("first")
    expect(page.locator(".message.answer .foot")).not_to_be_empty()
    assert page.locator(".message.answer .text").text_content() == "Once"
    ask("second")
    expect(page.locator(".message.answer .foot").nth(1)).not_to_be_empty()
    assert daemon.requests[-1][1]["messages"][1]["content"] == "\n\n Once"


def test_who_drafted_and_why_little_was_gained_are_said_in_plain_words(page, daemon, ask) -> None:
    daemon.pieces = [("la ", True)] * 20
    daemon.figures = {"accepted": 7, "accepted_cloud": 3, "tokens_per_second": 201.0, "cloud_tokens_per_second": 200.0}
    ask()
    expect(page.locator("#plain")).to_have_text(
        "20 tokens, of which 10 cost no step of their own: "
        "7 were guessed on this machine, 3 by a drafter in the cloud, and the model agreed. "
        "A step takes only about 5 ms here, so there is little time to save; a larger model gains more."
    )
    daemon.figures |= {"accepted": 1, "accepted_cloud": 0, "steps": 19}
    ask()
    expect(page.locator("#plain")).to_contain_text("Few guesses were right")


def test_what_is_not_known_yet_is_shown_as_such(page, daemon, ask) -> None:
    daemon.pieces = [("x", True)]
    daemon.figures = {"cloud_tokens_per_second": None, "acceptance": None, "round_trip_ms": None, "drafter": ""}
    ask()
    expect(page.locator("#cloud-rate")).to_have_text("not known yet")
    expect(page.locator("#acceptance")).to_have_text("–")
    expect(page.locator("#round-trip")).to_have_text("–")
    expect(page.locator("#drafter")).to_have_text("none")
    expect(page.locator("#ratio")).to_be_empty()


def test_every_turn_sends_the_whole_conversation_and_asks_for_speculation(page, daemon, ask) -> None:
    ask("first")
    expect(page.locator(".message.answer .foot").first).not_to_be_empty()
    page.get_by_label("Message", exact=True).fill("second")
    page.get_by_label("Message", exact=True).press("Shift+Enter")
    page.get_by_label("Message", exact=True).press_sequentially("line")
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.locator(".message.answer .foot").nth(1)).not_to_be_empty()
    path, body, _ = daemon.requests[-1]
    assert path == "/v1/chat/completions"
    assert [(turn["role"], turn["content"]) for turn in body["messages"]] == [
        ("user", "first"),
        ("assistant", "Once upon a time"),
        ("user", "second\nline"),
    ]
    assert body["stream_options"] == {"include_usage": True, "include_speculation": True}
    assert body["model"] == "reference"


def test_settings_are_sent_and_the_key_is_kept_in_memory_only(page, daemon, ask) -> None:
    page.get_by_role("button", name="Settings").click()
    for label, value in {"Temperature": "0.7", "Top p": "0.9", "Max tokens": "12", "Seed": "5"}.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("API key", exact=True).fill("sk-secret")
    page.get_by_role("button", name="Close").click()
    ask()
    expect(page.locator(".message.answer .foot")).not_to_be_empty()
    _, body, headers = daemon.requests[-1]
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 12,
        "seed": 5,
    }
    assert headers["authorization"] == "Bearer sk-secret"
    stored = page.evaluate("() => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert "sk-secret" not in stored
    page.reload()
    expect(page.locator("#api-key")).to_have_value("")


def test_a_setting_beyond_its_limits_is_said_before_anything_is_sent(page, daemon, ask) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("-1")
    page.get_by_role("button", name="Close").click()
    ask()
    expect(page.get_by_role("alert")).to_contain_text("Temperature")
    assert daemon.requests == []


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_request_itself_and_keeps_what_came(page, daemon, ask, how) -> None:
    daemon.hold = True
    ask()
    expect(page.locator(".message.answer .text")).to_have_text("Once upon a time")
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(page.locator(".message.answer .foot")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    for _ in range(200):
        if daemon.disconnects:
            break
        page.wait_for_timeout(50)
    assert daemon.disconnects == 1
    daemon.hold = False
    ask("go on")
    expect(page.locator(".message.answer .foot").nth(1)).not_to_be_empty()
    assert [turn["role"] for turn in daemon.requests[-1][1]["messages"]] == ["user", "assistant", "user"]


def test_hostile_text_stays_text_wherever_it_comes_from(page, daemon, ask) -> None:
    daemon.pieces = [(HOSTILE, True), (HOSTILE, False)]
    daemon.health = (200, {"status": "degraded", "reason": HOSTILE})
    ask(HOSTILE)
    expect(page.locator(".message.answer .foot")).not_to_be_empty()
    assert page.locator(".message.answer .text").text_content() == HOSTILE * 2
    look_again(page)
    expect(page.locator("#health-text")).to_contain_text("<img")
    daemon.refusals = [refusal(400, HOSTILE)]
    ask("again")
    expect(page.get_by_role("alert")).to_contain_text("<img")
    assert page.locator(".log img, .log script, #health img").count() == 0
    assert page.title() == "Outrider"


def test_the_page_refuses_scripts_that_are_not_files_of_the_daemon(page, daemon) -> None:
    policy = page.request.get(daemon.address).headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    source = page.request.get(daemon.address).text()
    assert not re.search(r"<style|<script(?![^>]* src=)|\sstyle=|\son\w+=|https?://", source)
    assert page.request.get(f"{daemon.address}/page/..%2f__init__.py").status == 404


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refusal(429, "32 texts are being decoded", {"Retry-After": "7"}), ["Too much at once", "32 texts", "in 7 s"]),
        (refusal(503, "no verifier is ready", {"Retry-After": "3"}), ["cloud cannot be reached", "in 3 s"]),
        (refusal(401, "wrong key"), ["API key"]),
        (refusal(400, "temperature: must be 0 or more"), ["refuses this request", "temperature"]),
    ],
    ids=["429", "503", "401", "400"],
)
def test_a_refusal_is_said_in_words_and_the_question_can_be_sent_again(page, daemon, ask, answer, words) -> None:
    daemon.refusals = [answer]
    ask("my question")
    for part in words:
        expect(page.get_by_role("alert")).to_contain_text(part)
    expect(page.get_by_label("Message", exact=True)).to_have_value("my question")
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.locator(".message.answer .foot")).not_to_be_empty()
    assert len(daemon.requests[-1][1]["messages"]) == 1


def test_a_text_that_breaks_off_keeps_what_came_and_says_so(page, daemon, ask) -> None:
    daemon.break_off = True
    ask()
    expect(page.get_by_role("alert")).to_contain_text("The cloud cannot be reached just now. “the verifier went away”")
    expect(page.locator(".message.answer .text")).to_have_text("Once upon a time")
    assert page.locator("[aria-busy=true]").count() == 0


def test_a_model_without_a_chat_template_continues_the_text_instead(page, daemon, ask) -> None:
    daemon.refusals = [refusal(400, "the model has no chat template", code="no_chat_template")]
    ask("Once")
    expect(page.locator(".message.answer .foot")).not_to_be_empty()
    path, body, _ = daemon.requests[-1]
    assert (path, body["prompt"]) == ("/v1/completions", "Once")
    expect(page.get_by_text("continues your text")).to_be_visible()
    ask("more")
    expect(page.locator(".message.answer .foot").nth(1)).not_to_be_empty()
    assert daemon.requests[-1][1]["prompt"] == "OnceOnce upon a time\nmore"


def test_the_health_line_follows_the_daemon(page, daemon) -> None:
    expect(page.locator("#health")).to_have_attribute("data-state", "ok")
    daemon.health = (200, {"status": "degraded", "reason": "the drafter failed"})
    look_again(page)
    expect(page.locator("#health-text")).to_have_text("degraded: the drafter failed")
    daemon.health = (503, {"status": "unavailable", "reason": "no coordinator answers"})
    expect(page.locator("#health-text")).to_have_text("unavailable: no coordinator answers", timeout=15_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground_in_light_and_dark(page, daemon, ask, scheme) -> None:
    page.emulate_media(color_scheme=scheme)
    page.get_by_text("Marks on").click()
    page.get_by_text("In detail").click()
    daemon.pieces = [("Once `x`\n\n```python\n# so\nx = f(1, 'a')\n```\n", True), ("[a](https://a.test)", False)]
    ask()
    expect(page.locator(".message.answer .foot")).not_to_be_empty()
    contrasts = page.evaluate(
        CONTRASTS, [".draft", ".own", ".foot", ".health", ".metrics dt", "#ratio", ".who", "#send"]
    )
    page.get_by_text("Subtle").click()
    scopes = [f".scope.{scope}" for scope in ("comment", "number", "string")]
    contrasts += page.evaluate(CONTRASTS, [".draft", ".own", ".text a", ".copy", ".tool", ".keys kbd", *scopes])
    assert min(contrasts) >= 4.5, contrasts


# WCAG 2.2, 1.4.3: contrast of the text's colour to the nearest ground that is painted.
CONTRASTS = """selectors => selectors.map((selector) => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const element = document.querySelector(selector);
  let ground = element;
  while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
  const [a, b] = [light(getComputedStyle(element).color), light(getComputedStyle(ground).backgroundColor)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
})"""
