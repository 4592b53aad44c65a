"""Import the modules of all commands, in the process from which `tests.subprocesses.Forked` forks."""

import importlib

import duplex.encoders.open_clip  # noqa: F401

importlib.import_module("torch._dynamo")  # which the first optimiser of a process imports, for seconds
