"""The state machine of the store, with more and longer runs than the tests: python -m tools.soak.model"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

_TEST = Path(__file__).parents[2] / "tests" / "storage" / "test_model.py"
_EXAMPLES_A_ROUND = 20


def _load_test() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_model", _TEST)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run from the command line; the first sequence of steps that fails is printed in its shortest form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=600)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    machine = _load_test().StoreMachine
    begin = time.monotonic()
    done = 0
    while done < given.examples:
        count = min(_EXAMPLES_A_ROUND, given.examples - done)
        chosen = settings(
            max_examples=count,
            stateful_step_count=given.steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(seed(given.seed + done)(machine), settings=chosen)
        done += count
        left = (time.monotonic() - begin) / done * (given.examples - done)
        print(f"{done} of {given.examples} sequences, about {left:.0f} s left", flush=True)
    print(f"{done} sequences of up to {given.steps} steps equal the model")


if __name__ == "__main__":
    main()
