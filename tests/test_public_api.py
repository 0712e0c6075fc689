"""The public names and their signatures: a change of them is a decision, and shows in `tests/public_api.txt`.

`python tests/test_public_api.py` writes the file anew.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

OURS = ("storage", "datapipe", "unirl")
FROZEN = Path(__file__).with_name("public_api.txt")
MODULES = (
    "storage",
    "datapipe",
    "unirl.algorithms",
    "unirl.errors",
    "unirl.explore",
    "unirl.policies.policy",
    "unirl.rewards",
    "unirl.rollout.engine",
    "unirl.trainer.recipe",
    "unirl.trainer.run",
    "unirl.types",
)


def public_api() -> list[str]:
    """One line for each name, each parameter list and each public member, in the order of the modules."""
    return [line for name in MODULES for line in _module_lines(importlib.import_module(name))]


def _module_lines(module: ModuleType) -> Iterator[str]:
    for name in sorted(module.__all__):
        value = getattr(module, name)
        where = f"{module.__name__}.{name}"
        if inspect.isclass(value):
            bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
            yield f"class {where}({bases})"
            yield from _member_lines(where, value)
        elif callable(value):
            yield f"{where}{_signature(value)}"
        else:
            yield where


def _member_lines(where: str, kind: type) -> Iterator[str]:
    if "__init__" in vars(kind) and not getattr(kind, "_is_protocol", False):
        yield f"  {where}{_signature(kind.__init__)}"
    if dataclasses.is_dataclass(kind):
        yield from (f"  {where}.{field.name}" for field in dataclasses.fields(kind))
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    ours = [base for base in kind.__mro__ if base.__module__.partition(".")[0] in OURS]
    members = {name: member for base in reversed(ours) for name, member in vars(base).items()}
    for name, member in sorted(members.items()):
        if name.startswith("_") or name in fields:
            continue
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        is_property = isinstance(function, property) or type(function).__name__ == "cached_property"
        if inspect.isfunction(function):
            yield f"  {where}.{name}{_signature(function)}"
        elif is_property:
            yield f"  {where}.{name}"


def _signature(function: object) -> str:
    """Names, kinds and defaults of the parameters; annotations may become more exact without a break."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    text = str(inspect.Signature(plain))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def test_the_public_names_are_those_that_were_agreed_on() -> None:
    frozen = FROZEN.read_text("utf-8").splitlines()
    found = public_api()
    gone = [line for line in frozen if line not in set(found)]
    added = [line for line in found if line not in set(frozen)]
    remedy = "if it is meant, run `python tests/test_public_api.py` and say it in CHANGELOG.md"
    assert (gone, added) == ([], []), remedy
    assert found == frozen


def test_every_public_name_exists_and_has_a_docstring() -> None:
    for name in MODULES:
        module = importlib.import_module(name)
        for public in module.__all__:
            value = getattr(module, public)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert inspect.getdoc(value), f"{name}.{public} has no docstring"


if __name__ == "__main__":
    FROZEN.write_text("\n".join(public_api()) + "\n", "utf-8")
