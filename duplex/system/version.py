"""The package's version: pyproject.toml, `duplex --version` and the server read it here."""

__version__ = "0.1.0"
