"""What the doctor finds here, and what it says of machines that lack something."""

from __future__ import annotations

import json
import resource
from collections import namedtuple
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unirl.cli import machine_checks, software_checks
from unirl.cli.app import app
from unirl.cli.check import Check
from unirl.cli.machine_checks import check_machine

GIB = 1 << 30
Usage = namedtuple("Usage", "total used free")


def test_this_machine_is_fit(tmp_path: Path) -> None:
    checks = {check.name: check for check in check_machine(tmp_path)}
    assert {
        "python",
        "packages",
        "vllm",
        "cores",
        "memory",
        "disk speed",
        "pictures",
        "videos",
    } <= checks.keys()
    assert [check for check in checks.values() if check.status == "problem"] == []
    assert "JPEG, PNG, WEBP" in checks["pictures"].found
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    assert all(check.remedy for check in checks.values() if check.status != "ok" and check.name != "gpu")


def test_json_and_text_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Check(name="packages", status="problem", found="torch is missing", remedy="pip install torch"),
        Check(name="gpu", status="note", found="none"),
    ]
    monkeypatch.setattr(machine_checks, "check_machine", lambda folder, *, deep: found)
    shown = CliRunner().invoke(app, ["doctor", "--folder", str(tmp_path)])
    assert shown.exit_code == 1
    assert "torch is missing" in shown.output and "-> pip install torch" in shown.output
    assert "1 problem, 0 warnings" in shown.output
    printed = CliRunner().invoke(app, ["doctor", "--folder", str(tmp_path), "--json"])
    assert printed.exit_code == 1
    assert [check["status"] for check in json.loads(printed.output)] == ["problem", "note"]


def test_a_package_of_another_version_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        software_checks, "requires", lambda name: ["torch>=99", "nothing-like-it", "ray; extra == 'ray'"]
    )
    check = software_checks.check_requirements()
    assert check.status == "problem"
    assert (
        "wanted >=99" in check.found
        and "nothing-like-it is missing" in check.found
        and "ray" not in check.found
    )
    assert check.remedy.startswith("pip install 'torch>=99' nothing-like-it")


def test_an_extra_that_is_missing_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software_checks, "EXTRAS", {"lora": (("no_such_module",), "LoRA adapters")})
    (check,) = software_checks.check_extras()
    assert (check.status, check.remedy) == ("note", "pip install 'unirl[lora]'")


def test_two_builds_of_vllm_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software_checks, "_version", lambda package: "1.0")
    assert software_checks.check_vllm(deep=False).status == "problem"
    monkeypatch.setattr(software_checks, "_version", lambda package: "")
    assert "pip install 'unirl[vllm]'" in software_checks.check_vllm(deep=False).remedy


def test_a_small_shared_memory_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda place: Usage(GIB // 16, 0, GIB // 16))
    check = machine_checks.check_shared_memory()
    assert check.status == "warning" and "--shm-size" in check.remedy


def test_a_full_disk_and_few_files_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda place: Usage(GIB, GIB, 0))
    assert next(iter(machine_checks.check_disk(tmp_path))).status == "warning"
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    assert "ulimit -n" in machine_checks.check_open_files().remedy


def test_a_disk_that_cannot_be_written_to_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *arguments: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    (_, check) = machine_checks.check_disk(tmp_path)
    assert check.status == "problem" and "Permission denied" in check.found


def test_more_threads_than_cores_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert "export OMP_NUM_THREADS=" in machine_checks.check_processors().remedy
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert machine_checks.check_processors().status == "ok"


def test_a_driver_without_a_torch_for_it_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert "CUDA builds" in machine_checks._no_gpu(None).remedy
    assert "CUDA_VISIBLE_DEVICES" in machine_checks._no_gpu("13.0").remedy


def test_a_vllm_that_is_imported_too_slowly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software_checks, "_version", lambda package: "1.0" if package == "vllm" else "")
    monkeypatch.setattr(software_checks, "VLLM_IMPORT_S", 0.001)
    check = software_checks.check_vllm(deep=True)
    assert check.status == "warning" and "was not imported within" in check.found


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 2}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 4}\n")
    monkeypatch.setattr(machine_checks, "CONTROL_GROUP", tmp_path)
    check = machine_checks.check_memory()
    assert check.status == "warning" and check.found == "0.8 of 1.0 GiB available"
    (tmp_path / "memory.max").write_text("max\n")
    assert "1.0 GiB" not in machine_checks.check_memory().found
