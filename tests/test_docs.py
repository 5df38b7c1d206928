"""The pages are there, short-lined and linked; their code compiles; the messages they quote are raised somewhere."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
sys.path.insert(0, str(DOCS))
import hooks  # noqa: E402  what mkdocs runs


def prose(page):
    """The lines that are wrapped: no tables, no code, no links that cannot be broken."""
    code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        code ^= line.startswith("```")
        if not code and not line.startswith(("|", "```")) and " " in line.strip():
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_on_the_site_and_its_links_and_code_hold(page):
    assert f"{page.name}\n" in (ROOT / "mkdocs.yml").read_text()
    text = page.read_text()
    for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", text):
        assert (DOCS / target).exists(), target
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        compile(block, page.name, "exec")
    if page.stem != "benchmarks":  # which the suite writes
        assert [number for number, line in prose(page) if len(line) > 120] == []


def test_the_site_lists_pages_that_are_there():
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES]


def test_the_messages_that_are_quoted_are_raised():
    raised = " ".join(re.sub(r'"\s*(\n\s*)f?"', "", path.read_text()) for path in (ROOT / "src" / "unwall").rglob("*.py"))
    table = (DOCS / "errors.md").read_text().split("## The frequent ones")[1].split("## Every message")[0]
    quoted = re.findall(r'^\| "(.*?)" \|', table, re.MULTILINE)
    assert len(quoted) > 15
    for message in quoted:
        for part in message.split("..."):
            assert part.strip() in raised, message


def test_every_message_is_found_in_the_sources():
    shown = hooks.every_message()
    assert shown.count("\n| `") > 300
    assert "| `RuntimeError` | ... is already sharded: call unwall.shard once, on the whole model |" in shown
