"""Import the modules of all commands, in the process from which `tests.subprocesses.Forked` forks."""

from importlib import import_module

import tests.remembered  # noqa: F401
from duplex.system import code

import_module("torch._dynamo")  # which the first optimiser of a process imports, for seconds
for path in code.PACKAGE.rglob("*.py"):  # of which each stage hashes many
    code._parse(path.read_bytes())
