"""The package's version, which pyproject.toml, `duplex --version` and the server read from here."""

__version__ = "0.1.0"
