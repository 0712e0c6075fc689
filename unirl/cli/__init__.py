"""The command line. `unirl --help` lists the commands."""

from unirl.cli.app import main

__all__ = ["main"]
