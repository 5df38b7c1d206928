"""Numbers as one reads them."""


def count(number: int) -> str:
    """``6442450944`` as ``6.44 B``."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"
