"""Where a run comes from: what was recorded, and the commands that make it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

__all__ = ["recorded_facts", "repeating_commands"]


def recorded_facts(header: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and text of what `run.json` says about a run; what it does not say is left out."""
    versions = header.get("versions")
    reward = header.get("reward")
    shown = {
        "recipe": header.get("recipe"),
        "seed": header.get("seed"),
        "started": header.get("created"),
        "data": header.get("store"),
        "snapshot": header.get("snapshot"),
        "reward": _reward(reward) if isinstance(reward, Mapping) else None,
        "commit": header.get("commit"),
        "versions": (
            ", ".join(f"{name} {version}" for name, version in versions.items())
            if isinstance(versions, Mapping)
            else versions
        ),
    }
    return [(name, str(value)) for name, value in shown.items() if value not in (None, "")]


def repeating_commands(header: Mapping[str, Any]) -> list[str]:
    """Return the lines of a shell that make a run again: its commit, its versions, its recipe and settings.

    Empty where `run.json` names no recipe. The recipe makes or reads its data by itself; the snapshot among
    the facts says whether it is the same.
    """
    if not header.get("recipe"):
        return []
    lines = []
    if header.get("commit"):
        lines.append(shlex.join(["git", "checkout", str(header["commit"])]))
    versions = header.get("versions")
    if isinstance(versions, Mapping):
        # A local part such as +cpu says where a wheel came from, and no index knows it.
        pins = {str(name): str(version).partition("+")[0] for name, version in versions.items()}
        pins.pop("python", None)
        pins.pop("unirl", None)
        if pins:
            lines.append(shlex.join(["pip", "install", "-e", ".", *(f"{k}=={v}" for k, v in pins.items())]))
    command = ["unirl", "train", str(header["recipe"]), "--run", "runs/again"]
    command += ["--seed", str(header.get("seed", 0))]
    for assignment in header.get("assignments") or ():
        command += ["--set", str(assignment)]
    return [*lines, shlex.join(command)]


def _reward(reward: Mapping[str, Any]) -> str:
    identity = reward.get("identity")
    return f"version {reward.get('version')}" + (f", {identity}" if identity else "")
