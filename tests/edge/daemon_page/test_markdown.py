"""Answers in Markdown: what is shown, the marks of drafts in it, and texts that mean harm."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install --group dev")
from playwright.sync_api import expect

MARKS = """element => [...element.querySelectorAll('.token')].map((token) =>
  [token.className.split(' ')[1], token.textContent])"""


@pytest.fixture
def answer(page, daemon, ask):
    """Streams pieces as an answer, and returns where it is shown."""

    def answer(*pieces):
        daemon.pieces = [piece if isinstance(piece, tuple) else (piece, False) for piece in pieces]
        before = page.locator(".message.answer").count()
        ask()
        expect(page.locator(".message.answer .foot").nth(before)).not_to_be_empty()
        return page.locator(".message.answer .text").last

    return answer


def letters(text):
    """Cut a text into pieces of one character, of which every second was drafted."""
    return [(letter, i % 2 == 1) for i, letter in enumerate(text)]


def test_markdown_is_shown_as_what_it_says(answer) -> None:
    text = answer(
        "# Title\n\nSome **bold**, *slanted* and `code`.\nNext line\n\n1. one\n2. two\n   - inner\n\n",
        "| a | b |\n|---|--:|\n| 1 | 2 |\n\n> said\n\n---\n\n- [x] done\n\nA &lt; B &amp; C",
    )
    for selector, words in {
        "h3": "Title",
        "strong": "bold",
        "em": "slanted",
        "p code": "code",
        "ol > li > ul > li": "inner",
        "th >> nth=1": "b",
        "td.to-right": "2",
        "blockquote": "said",
        "li.task": "done",
        "p >> nth=-1": "A < B & C",
    }.items():
        expect(text.locator(selector)).to_have_text(words)
    expect(text.locator("br")).to_have_count(1)
    expect(text.locator("hr")).to_have_count(1)
    expect(text.locator("input[type=checkbox]")).to_be_disabled()


def test_marks_survive_markdown_inside_words_lists_tables_and_code(answer) -> None:
    text = answer(
        ("Some **bo", True),
        ("ld** te", False),
        ("xt\n\n- it", True),
        ("em\n\n  ```python\n  if x", False),
        (":\n      re", True),
        ("turn 1\n  ```\n\n> quo", False),
        ("ted\n> twi", True),
        ("ce\n\n| a | b |\n|---|---|\n| c", False),
        ("ell | d |\n", True),
    )
    assert text.evaluate(MARKS) == [
        ["draft", "Some"],
        ["draft", "bo"],
        ["own", "ld"],
        ["own", "te"],
        ["draft", "xt"],
        ["draft", "it"],
        ["own", "em"],
        ["own", "if x"],
        ["draft", ":\n    re"],
        ["own", "turn 1"],
        ["own", "quo"],
        ["draft", "ted"],
        ["draft", "twi"],
        ["own", "ce"],
        ["own", "a"],
        ["own", "b"],
        ["own", "c"],
        ["draft", "ell"],
        ["draft", "d"],
    ]


def test_what_a_model_thinks_first_is_folded_away_and_keeps_its_marks(page, answer) -> None:
    text = answer("<think>\nFirst ", ("I *add*.", True), "\n</think>\n\nIt is **5**.")
    expect(text.locator("strong")).to_have_text("5")
    thought = text.locator("details p")
    expect(thought).to_be_hidden()
    text.get_by_text("Thinking").click()
    expect(thought).to_have_text("First I *add*.")
    expect(thought.locator(".draft")).to_have_text("I *add*.")


def test_a_text_that_comes_letter_by_letter_looks_like_one_that_comes_at_once(answer) -> None:
    text = "# T\n\nA **b** `c`\n\n* x\n* y\n\n  z\n\n```js\nlet a = 1;\n```\n\n[later][1] and *unclosed\n\n[1]: https://a.test/\n"
    slowly = answer(*letters(text)).inner_html()
    at_once = answer((text, False)).inner_html()

    def without_marks(html):
        for kind in ("draft", "own"):
            html = html.replace(f'<span class="token {kind}">', "<span>")
        return html

    assert 'class="token draft"' in slowly
    page_text = [without_marks(html).count(tag) for html in (slowly, at_once) for tag in ("<p>", "<li>", "<a ", "<h3>")]
    assert page_text[:4] == page_text[4:]


def test_code_has_its_language_colours_and_a_button_that_copies_it_exactly(page, answer) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    code = 'def f(x):\n\treturn "<b>" + x  # so\n'
    text = answer(f"Look:\n\n```python title=x\n{code}```\n\nDone")
    expect(text.locator("figcaption span")).to_have_text("python title=x")
    expect(text.locator(".scope.keyword").first).to_have_text("def")
    expect(text.locator(".scope.string")).to_have_text('"<b>"')
    text.get_by_role("button", name="Copy").click()
    expect(text.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == code.rstrip("\n")


def test_colours_of_code_give_way_where_marks_are_on(page, answer) -> None:
    colour = "e => getComputedStyle(e).color"
    keyword = answer(("```python\nde", True), ("f f(): pass\n```", False)).locator(".scope.keyword").first
    subtle = keyword.evaluate(colour)
    page.get_by_text("Marks on").click()
    assert keyword.evaluate(colour) != subtle


REACH = "img, script, iframe, style, svg, object, embed, form, [onerror], [onload], [onmouseover]"
HOSTILE = [
    "<script>document.title='owned'</script><img src=/owned onerror=\"document.title='owned'\">",
    "a <img src=/owned onerror=\"document.title='owned'\"> b",
    "[x](javascript:document.title='owned') [y](data:text/html,owned) [z](/owned) [w](vbscript:x)",
    "<a href=\"javascript:document.title='owned'\">x</a> <iframe src=/owned></iframe> <svg onload=owned()></svg>",
    '[x](https://a.test/"onmouseover="document.title=1)\n\n[y]: javascript:owned',
    "```html\n<script>document.title='owned'</script>\n",
    "```<img/src=/owned>\nx\n```",
    "| <img src=/owned> |\n|---|\n| <style>@import '/owned'</style> |",
    "&lt;img src=/owned&gt; &#60;script&#62; &#x110000; &#0;",
]
DEEP_OR_SLOW = ["> " * 3000, "1. " * 3000, "*a_" * 4000, "[" * 20_000, "x" * 100_000, "- a\n" * 500 + "`" * 5000]


def test_a_hostile_text_is_shown_and_has_nothing_to_reach_for(page, daemon, answer) -> None:
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    for text in HOSTILE:
        shown = answer(text)
        assert shown.locator(REACH).count() == 0, text
        links = shown.locator("a").evaluate_all("links => links.map((link) => [link.protocol, link.rel, link.target])")
        assert all(link == ["https:", "noopener noreferrer", "_blank"] for link in links), text
    expect(page.locator(".message.answer .text").first).to_have_text(HOSTILE[0])
    page.reload()
    expect(page.locator(".message.answer")).to_have_count(len(HOSTILE))
    assert page.title() == "Outrider"
    assert [url for url in asked if "owned" in url] == []


def test_an_image_is_a_link_that_loads_nothing_until_it_is_followed(page, answer) -> None:
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    shown = answer("![a cat](https://elsewhere.test/cat.png)")
    expect(shown.locator("a.image")).to_have_attribute("href", "https://elsewhere.test/cat.png")
    expect(shown).to_have_text("a cat")
    assert not any("elsewhere" in url for url in asked)


def test_a_text_made_to_be_slow_or_deep_is_shown_all_the_same(page, answer) -> None:
    for text in DEEP_OR_SLOW:
        shown = answer(*(text[i : i + 4000] for i in range(0, len(text), 4000)), " the end")
        expect(shown).to_contain_text("the end")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1200


def test_plain_text_is_shown_as_it_was_written_with_its_marks(page, answer) -> None:
    text = answer("# not a *title*", (" <b>", True))
    expect(text.locator("h3")).to_have_text("not a title <b>")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Answers").select_option("plain")
    expect(text).to_have_text("# not a *title* <b>")
    expect(text.locator(".draft")).to_have_text("<b>")


def test_blocks_that_are_complete_are_left_alone_while_others_grow(page, daemon, ask) -> None:
    daemon.hold = True
    daemon.pieces = [("first\n\n", False), ("second\n\n", True), ("third", False)]
    page.evaluate(
        """() => {
          window.touched = [];
          new MutationObserver((changes) => changes.forEach((change) => {
            const block = change.target.nodeType === 1 && change.target.closest('.text > p');
            if (block) window.touched.push(block.textContent);
          })).observe(document.querySelector('#thread'), {childList: true, characterData: true, subtree: true});
        }"""
    )
    ask()
    text = page.locator(".message.answer .text")
    expect(text.locator("p")).to_have_text(["first", "second", "third"])
    page.keyboard.press("Escape")
    expect(page.locator(".message.answer .foot")).to_contain_text("stopped")
    assert page.evaluate("window.touched.filter((text) => text === 'first')") == []
