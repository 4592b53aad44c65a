"""Tools for releases. Nothing here imports the package."""
