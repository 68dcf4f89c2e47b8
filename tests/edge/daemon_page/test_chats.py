"""Chats that the browser keeps, and what can be done with their turns."""

from __future__ import annotations

import json

import pytest
from starlette.responses import JSONResponse

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install --group dev")
from playwright.sync_api import expect

# ruff: noqa: RUF001 - the page shows such signs

# Places of what is in view while an answer streams and after it, and the height of all messages.
TOPS = """() => [
  ...['.message.answer .text p', '#composer', '.under-composer']
    .map((selector) => document.querySelector(selector).getBoundingClientRect().top),
  document.querySelector('#thread').scrollHeight,
]"""
UNNAMED = """() => [...document.querySelectorAll('button, input, select, textarea')]
  .filter((e) => !(e.ariaLabel || e.labels?.length || e.textContent.trim() || e.hidden)).map((e) => e.outerHTML)"""
STORED = "Object.keys(localStorage).filter((key) => key.startsWith('outrider.chat.'))"


def answered(page, count=1):
    expect(page.locator(".message.answer[aria-busy=false], .message.answer:not([aria-busy])")).to_have_count(count)
    expect(page.locator(".message.answer .foot").last).not_to_be_empty()


def act(page, name, message=-1):
    message = page.locator(".message").nth(message)
    message.hover()
    message.get_by_role("button", name=name, exact=True).click()


def sent(daemon):
    return [(turn["role"], turn["content"]) for turn in daemon.requests[-1][1]["messages"]]


def titles(page):
    return page.locator("#chat-list .open")


def choose(page, label, value):
    page.get_by_role("button", name="Settings").click()
    field = page.get_by_label(label)
    field.select_option(value) if field.evaluate("f => f.tagName") == "SELECT" else field.fill(value)
    page.get_by_role("button", name="Close").click()


def test_a_chat_survives_a_reload_with_its_marks_and_goes_on(page, daemon, ask) -> None:
    ask("first")
    answered(page)
    shown = page.locator(".message.answer .text").inner_html()
    assert "draft" in shown
    page.reload()
    expect(page.locator(".message.user .text")).to_have_text("first")
    assert page.locator(".message.answer .text").inner_html() == shown
    expect(page.locator(".message.answer .foot")).to_contain_text("target step")
    expect(page.locator("#ratio")).to_have_text("2.40×")
    ask("second")
    answered(page, 2)
    assert sent(daemon) == [("user", "first"), ("assistant", "Once upon a time"), ("user", "second")]


def test_a_reload_in_the_middle_of_an_answer_keeps_what_came(page, daemon, ask) -> None:
    daemon.hold = True
    ask("first")
    expect(page.locator(".message.answer .text")).to_have_text("Once upon a time")
    page.reload()
    expect(page.locator(".message.answer .text")).to_have_text("Once upon a time")
    assert page.locator("[aria-busy=true]").count() == 0


def test_chats_are_listed_opened_renamed_deleted_and_brought_back(page, daemon, ask) -> None:
    for i, question in enumerate(("About trains", "About ships")):
        page.get_by_role("button", name="New chat").click()
        ask(question)
        answered(page)
        expect(titles(page)).to_have_count(i + 1)
    expect(titles(page)).to_have_text(["About ships", "About trains"])
    titles(page).nth(1).click()
    expect(page.locator(".message.user .text")).to_have_text("About trains")
    expect(titles(page).nth(1)).to_have_attribute("aria-current", "true")
    page.locator("#chat-list li").nth(1).hover()
    page.get_by_role("button", name="Rename About trains").click()
    page.get_by_label("Name of the chat").fill("Rails <b>")
    page.keyboard.press("Enter")
    expect(titles(page).nth(1)).to_have_text("Rails <b>")
    page.reload()
    expect(titles(page)).to_have_text(["About ships", "Rails <b>"])
    expect(page.locator(".message.user .text")).to_have_text("About trains")
    page.locator("#chat-list li").nth(1).hover()
    page.get_by_role("button", name="Delete Rails").click()
    expect(titles(page)).to_have_text(["About ships"])
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(titles(page)).to_have_text(["About ships", "Rails <b>"])
    expect(page.locator(".message.user .text")).to_have_text("About trains")


def test_regenerate_asks_the_same_again_and_cuts_what_follows(page, daemon, ask) -> None:
    ask("first")
    answered(page)
    ask("second")
    answered(page, 2)
    daemon.pieces = [("Twice", True)]
    act(page, "Regenerate", 1)
    expect(page.locator(".message.answer .text")).to_have_text("Twice")
    answered(page)
    assert sent(daemon) == [("user", "first")]
    page.reload()
    expect(page.locator(".message .text")).to_have_text(["first", "Twice"])


def test_the_same_text_again_is_explained_where_it_must_be_the_same(page, daemon, ask) -> None:
    choose(page, "Temperature", "0")
    ask("first")
    answered(page)
    act(page, "Regenerate")
    expect(page.get_by_text("The same text again")).to_be_visible()


def test_a_turn_is_edited_in_place_and_what_follows_is_cut(page, daemon, ask) -> None:
    ask("first")
    answered(page)
    ask("second")
    answered(page, 2)
    act(page, "Edit", 0)
    page.get_by_label("Your turn").fill("changed")
    page.keyboard.press("Escape")
    expect(page.locator(".message .text").first).to_have_text("first")
    act(page, "Edit", 0)
    page.get_by_label("Your turn").fill("changed")
    page.keyboard.press("Enter")
    answered(page)
    assert sent(daemon) == [("user", "changed")]
    expect(page.locator(".message .text")).to_have_text(["changed", "Once upon a time"])


@pytest.mark.parametrize("how", ["Regenerate", "Edit"])
def test_what_was_there_comes_back_where_no_answer_does(page, daemon, ask, how) -> None:
    ask("first")
    answered(page)
    daemon.refusals = [JSONResponse({"error": {"message": "no verifier is ready"}}, 503)]
    act(page, how, 1 if how == "Regenerate" else 0)
    if how == "Edit":
        page.get_by_label("Your turn").fill("changed")
        page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The cloud cannot be reached")
    expect(page.locator(".message.answer .text")).to_have_text("Once upon a time")
    if how == "Edit":
        expect(page.get_by_label("Your turn")).to_have_value("changed")
    page.reload()
    expect(page.locator(".message .text")).to_have_text(["first", "Once upon a time"])


def test_an_answer_goes_on_in_its_chat_while_another_is_read(page, daemon, ask) -> None:
    ask("first")
    answered(page)
    page.get_by_role("button", name="New chat").click()
    daemon.hold = True
    ask("second")
    expect(page.locator(".message.answer .text")).to_have_text("Once upon a time")
    titles(page).get_by_text("first").click()
    expect(page.locator(".message.user .text")).to_have_text("first")
    daemon.hold = False
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    titles(page).get_by_text("second").click()
    expect(page.locator(".message .text")).to_have_text(["second", "Once upon a time"])
    expect(page.locator(".message.answer .foot")).to_contain_text("target step")


def test_theme_marking_and_settings_persist_and_the_system_prompt_leads(page, daemon, ask) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    choose(page, "Theme", "dark")
    choose(page, "System prompt", "Be brief.")
    choose(page, "Seed", "7")
    page.get_by_text("Off", exact=True).click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    ask("first")
    answered(page)
    assert sent(daemon) == [("system", "Be brief."), ("user", "first")]
    assert daemon.requests[-1][1]["seed"] == 7
    expect(page.get_by_label("Off", exact=True)).to_be_checked()
    style = "e => [getComputedStyle(e).textDecorationLine, getComputedStyle(e).backgroundColor]"
    assert page.locator(".message .draft").evaluate(style) == ["none", "rgba(0, 0, 0, 0)"]


def test_a_key_is_asked_for_and_kept_only_where_that_is_wished(page, daemon, ask) -> None:
    daemon.key = "sk-secret"
    page.reload()
    expect(page.locator("#banner-text")).to_have_text("The daemon wants an API key. Enter yours in the settings.")
    page.get_by_role("button", name="Enter a key").click()
    page.get_by_label("API key", exact=True).fill("sk-secret")
    page.get_by_label("Keep the key").check()
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#banner")).to_be_hidden()
    page.reload()
    ask("first")
    answered(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Keep the key").uncheck()
    assert "sk-secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_chats_go_out_as_a_file_and_come_in_again(page, daemon, ask, tmp_path) -> None:
    ask("first")
    answered(page)
    page.get_by_role("button", name="Settings").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    page.evaluate("localStorage.clear()")
    page.goto(daemon.address)
    expect(titles(page)).to_have_count(0)
    page.get_by_role("button", name="Settings").click()
    page.locator("#import-file").set_input_files(file)
    expect(page.locator("#import-note")).to_have_text("1 chat imported.")
    expect(titles(page)).to_have_text(["first"])
    file.write_text(json.dumps({"format": "outrider-chats-1", "chats": [{"id": "../x", "title": 1}]}))
    page.locator("#import-file").set_input_files(file)
    expect(page.locator("#import-note")).to_contain_text("no file of chats")


def test_what_is_kept_is_bounded_and_what_is_damaged_is_passed_over(page, daemon, ask) -> None:
    page.evaluate(
        """() => {
          const turns = [{role: "user", content: "old"}, {role: "assistant", content: "x".repeat(20000)}];
          for (let i = 0; i < 230; i++) {
            localStorage["outrider.chat.c" + i] = JSON.stringify({id: "c" + i, title: "old " + i, updated: i, turns});
          }
          localStorage["outrider.chat.broken"] = "{";
          localStorage["outrider.chat.strange"] = JSON.stringify({id: "strange", turns: [{role: "system"}]});
        }"""
    )
    page.reload()
    ask("new")
    answered(page)
    expect(titles(page).first).to_have_text("new")
    expect(titles(page)).to_have_count(200)
    assert page.evaluate(f"{STORED}.includes('outrider.chat.c0')") is False
    page.evaluate("localStorage.filler = 'x'.repeat(5 * 1024 * 1024 - JSON.stringify(localStorage).length - 3000)")
    daemon.pieces = [("long " * 4000, True)]
    ask("more")
    expect(page.locator(".note.hint")).to_contain_text("oldest chats went")
    answered(page, 2)
    page.reload()
    expect(page.locator(".message")).to_have_count(4)


def test_the_end_stays_in_view_until_the_reader_scrolls_away(page, daemon, ask) -> None:
    daemon.hold = True
    daemon.pieces = [(f"paragraph {i}\n\n", False) for i in range(60)]
    ask()
    expect(page.get_by_text("paragraph 59")).to_be_in_viewport()
    page.keyboard.press("Escape")
    answered(page)
    daemon.pieces = [(f"later {i}\n\n", False) for i in range(60)]
    ask()
    expect(page.get_by_text("later 3", exact=True)).to_have_count(1)
    page.locator("#log").evaluate("log => { log.scrollTop = 0; }")
    expect(page.get_by_text("later 59")).to_have_count(1)
    assert page.locator("#log").evaluate("log => log.scrollTop") == 0
    page.get_by_role("button", name="Latest").click()
    expect(page.get_by_text("later 59")).to_be_in_viewport()
    page.keyboard.press("Escape")


def test_nothing_moves_when_an_answer_ends(page, daemon, ask) -> None:
    daemon.hold = True
    ask()
    expect(page.locator(".message.answer .text")).to_have_text("Once upon a time")
    before = page.evaluate(TOPS)
    daemon.hold = False
    answered(page)
    assert page.evaluate(TOPS) == before


def test_every_control_has_a_name_and_drawers_keep_out_of_the_way_on_phones(page, daemon, ask) -> None:
    assert page.evaluate(UNNAMED) == []
    page.set_viewport_size({"width": 375, "height": 740})
    expect(page.locator("#chats")).to_be_hidden()
    expect(page.locator("#happening")).to_be_hidden()
    daemon.pieces = [("a-very-long-word-" * 20, True), (" end", False)]
    ask()
    answered(page)
    expect(page.get_by_label("Message", exact=True)).to_be_in_viewport()
    page.get_by_role("button", name="What happens").click()
    expect(page.locator("#ratio")).to_have_text("2.40×")
    page.keyboard.press("Escape")
    expect(page.locator("#happening")).to_be_hidden()
    page.get_by_role("button", name="Chats", exact=True).click()
    titles(page).first.click()
    expect(page.locator("#chats")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
