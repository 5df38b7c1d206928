"""Run by mkdocs: fills in the list of all error messages, read from the sources, so that the page cannot be out of date."""

import ast
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent.parent / "src" / "unwall"
MARK = "<!-- every message -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(MARK, every_message()) if MARK in markdown else markdown


def every_message() -> str:
    """A table per package: the kind of error, and its text with what is filled in shown as ``...``."""
    lines = []
    for package in sorted({path.relative_to(SOURCES).parts[0] for path in SOURCES.rglob("*.py")}):
        top = SOURCES / package
        found = [entry for path in sorted(top.rglob("*.py") if top.is_dir() else [top]) for entry in messages(path)]
        if found:
            lines += ["", f"### {package.removesuffix('.py')}", "", "| error | message |", "|---|---|"]
            lines += [f"| `{kind}` | {text} |" for kind, text in sorted(set(found))]
    return "\n".join(lines)


def messages(path: Path) -> list[tuple[str, str]]:
    """The errors raised in a file whose text is written where they are raised."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind, text = ast.unparse(node.exc.func).split(".")[-1], text_of(node.exc.args[0])
            if len(text.replace("...", "").strip()) > 12:
                found.append((kind, text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")))
    return found


def text_of(node: ast.expr) -> str:
    """The text of a literal, or of an f-string with ``...`` for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "..."
