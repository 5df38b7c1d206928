"""``python -m unwall``: the ``unwall`` command where nothing is installed."""

from unwall.cli import app

if __name__ == "__main__":
    app(prog_name="unwall")
