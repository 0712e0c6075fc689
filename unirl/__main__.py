"""`python -m unirl`: the command line, for launchers that start modules."""

from __future__ import annotations

from unirl.cli import main

if __name__ == "__main__":
    main()
