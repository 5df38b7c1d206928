"""Where the time from the command to its first step went: one bar."""

from html import escape

from unwall.report.run import Run, is_number


def until_first_step(run: Run) -> str:
    """Of the last start. Nothing where the log does not say."""
    parts = run.starts[-1].get("parts") if run.starts else None
    if not isinstance(parts, dict):
        return ""
    found = [(str(name), float(value)) for name, value in parts.items() if is_number(value) and value > 0]
    total = sum(seconds for _, seconds in found)
    if not total:
        return ""
    bar = "".join(
        f'<i class="c{number % 8}" style="flex-grow:{seconds:.3f}" title="{escape(name)} {seconds:.1f} s"></i>'
        for number, (name, seconds) in enumerate(found)
    )
    legend = "".join(
        f'<li><span class="swatch c{number % 8}"></span>{escape(name)} {seconds:.1f} s</li>'
        for number, (name, seconds) in enumerate(found)
    )
    again = f" (the last of {len(run.starts)} starts)" if len(run.starts) > 1 else ""
    return (
        f"<p>The first step was done {total:.1f} s after the command{again}, on rank 0.</p>"
        f'<div class="stack" aria-hidden="true">{bar}</div><ul class="legend">{legend}</ul>'
    )
