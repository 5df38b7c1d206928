"""The version, in its one place: pyproject.toml reads it from here, so that it is known without an installation, too."""

__version__ = "0.1.0"
