from tests.commands import command, project

__all__ = ["command", "project"]
