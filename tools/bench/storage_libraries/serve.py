"""A process that runs the tasks of one library: one JSON object a line in, one out.

python -m tools.bench.storage_libraries.serve PACKAGE.MODULE
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tools.bench.storage_libraries.task import Task


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What a library prints must not get between the answers.
    module = importlib.import_module(f"tools.bench.{sys.argv[1]}")
    tasks: dict[str, Task] = {}
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        name = request["task"]
        try:
            if request["do"] == "open":
                tasks[name] = module.TASKS[name](Path(request["data"]), Path(request["folder"]))
                answer: dict[str, Any] = {}
            elif request["do"] == "close":
                tasks.pop(name, None)
                answer = {}
            else:
                answer = tasks[name].run(request["round"])
        except Exception as error:  # The driver reports what a library cannot do and goes on.
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
