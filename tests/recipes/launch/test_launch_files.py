"""What `recipes/launch` ships: read by the programs that read it in earnest, and run with stubs."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.run import get_args_parser as torchrun_parser

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "recipes" / "launch"
SHARDED = {"two_gpus": (1, 2), "eight_gpus": (1, 8), "two_nodes": (2, 16)}


def launched() -> list[str]:
    """Every command of the documentation that starts ranks by a launcher."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text("utf-8") for page in pages).replace("\\\n", " ")
    found = re.findall(r"(?:^|`)((?:torchrun|accelerate launch) [^`\n#]+)", text, flags=re.MULTILINE)
    return [
        command for command in found if " train " in command or " recipes." in command or ".py" in command
    ]


@pytest.mark.parametrize("command", launched())
def test_launchers_read_the_commands_of_the_documentation(command: str) -> None:
    """torchrun takes `--run` for a short form of an option of its own, unless `--` stands before."""
    words = shlex.split(command)
    is_torchrun = words[0] == "torchrun"
    parser = torchrun_parser() if is_torchrun else launch_command_parser()
    read = parser.parse_args(words[1 if is_torchrun else 2 :])
    assert read.training_script in ("unirl", "recipes.shapes", "my_shapes.py")
    assert read.module == (not read.training_script.endswith(".py"))
    ours = words[words.index(read.training_script) + 1 :]
    assert read.training_script_args == ours


def test_one_gpu_is_not_sharded() -> None:
    config = load_config_from_file(str(LAUNCH / "one_gpu.yaml"))
    assert (config.distributed_type, config.num_processes, config.mixed_precision) == (
        DistributedType.NO,
        1,
        "bf16",
    )


@pytest.mark.parametrize("name", sorted(SHARDED))
def test_several_gpus_are_sharded_by_fsdp2(name: str) -> None:
    path = LAUNCH / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert config.distributed_type == DistributedType.FSDP
    assert (config.num_machines, config.num_processes) == SHARDED[name]
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "-m", "unirl", "train", "x"])
    checked, _, _ = _validate_launch_command(arguments)
    variables = prepare_multi_gpu_env(checked)
    assert (variables["ACCELERATE_USE_FSDP"], variables["FSDP_VERSION"]) == ("true", "2")
    assert variables["FSDP_RESHARD_AFTER_FORWARD"] == "true"
    assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sbatch")), ids=lambda path: path.stem)
def test_scripts_are_bash(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_a_pod_that_was_stopped_or_evicted_is_no_failure() -> None:
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    rules = job["spec"]["podFailurePolicy"]["rules"]
    pod = job["spec"]["template"]["spec"]
    codes = [rule for rule in rules if "onExitCodes" in rule]
    assert pod["restartPolicy"] == "Never"
    assert [(rule["action"], rule["onExitCodes"]["values"]) for rule in codes] == [("Ignore", [75])]
    assert codes[0]["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert {"type": "DisruptionTarget"} in [c for rule in rules for c in rule.get("onPodConditions", [])]
    assert pod["terminationGracePeriodSeconds"] > 15


def test_servers_have_a_service_each() -> None:
    documents = list(yaml.safe_load_all((LAUNCH / "kubernetes_servers.yaml").read_text()))
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    pods = {d["metadata"]["name"]: d["spec"]["template"] for d in documents if d["kind"] == "Deployment"}
    assert services.keys() == pods.keys() == {"unirl-rollout", "unirl-reward"}
    for name, pod in pods.items():
        assert services[name]["selector"] == pod["metadata"]["labels"]
        ports = [port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]]
        assert [port["port"] for port in services[name]["ports"]] == ports


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


class Slurm:
    """A Slurm of stubs: `srun` runs one task, `scontrol` writes down what it is asked."""

    def __init__(self, directory: Path, *, task: str, restarts: int = 0) -> None:
        self.directory = directory
        program(directory / "unirl", f'echo "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $*" > asked\n{task}')
        program(directory / "srun", 'shift\nexport SLURM_PROCID=3 SLURM_NTASKS=16 SLURM_LOCALID=3\nexec "$@"')
        program(
            directory / "scontrol",
            '[[ $1 == show ]] && printf "node7\\nnode8\\n" || echo "$*" >> requeued',
        )
        variables = {
            "PATH": f"{directory}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "4242",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        self.job = subprocess.Popen(
            ["bash", str(LAUNCH / "slurm.sbatch"), "shapes", "--run", "a b"],
            cwd=directory,
            env={**os.environ, **variables},
        )

    def end(self) -> int:
        return self.job.wait(timeout=30)

    def read(self, name: str) -> str | None:
        path = self.directory / name
        return path.read_text().strip() if path.exists() else None


def test_a_job_that_was_stopped_is_put_back(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, task="exit 75")
    assert slurm.end() == 0
    assert slurm.read("requeued") == "requeue 4242"
    assert slurm.read("asked") == "3 16 3 node7 train shapes --run a b"


@pytest.mark.parametrize(("code", "restarts"), [(0, 0), (1, 0), (75, 50)])
def test_other_jobs_end_with_their_code(tmp_path: Path, code: int, restarts: int) -> None:
    slurm = Slurm(tmp_path, task=f"exit {code}", restarts=restarts)
    assert slurm.end() == code
    assert slurm.read("requeued") is None


def test_the_request_to_stop_reaches_the_task(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, task='trap "exit 75" USR1\ntouch ready\nwhile :; do sleep 0.05; done')
    wait_for(tmp_path / "ready")
    slurm.job.send_signal(signal.SIGUSR1)
    assert slurm.end() == 0
    assert slurm.read("requeued") == "requeue 4242"


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_ranks(directory: Path, task: str, **variables: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "recipes.launch.ranks", "2", "bash", "-c", task]
    environ = {**os.environ, **variables, "PYTHONPATH": str(LAUNCH.parents[1])}
    return subprocess.Popen(command, cwd=directory, env=environ)


def test_ranks_know_their_place(tmp_path: Path) -> None:
    task = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR" > "rank-$RANK"'
    ranks = start_ranks(tmp_path, task, NUM_NODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    assert ranks.wait(timeout=30) == 0
    told = {path.name: path.read_text().strip() for path in tmp_path.iterdir()}
    assert told == {"rank-2": "2 0 4 2 10.0.0.1", "rank-3": "3 1 4 2 10.0.0.1"}


def test_ranks_that_are_stopped_end_with_75(tmp_path: Path) -> None:
    task = 'trap "exit 75" USR1; touch "ready-$RANK"; while :; do sleep 0.05; done'
    ranks = start_ranks(tmp_path, task)
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    ranks.send_signal(signal.SIGUSR1)
    assert ranks.wait(timeout=30) == 75


def test_a_rank_that_fails_takes_the_others_along(tmp_path: Path) -> None:
    task = '[[ $RANK == 1 ]] && exit 7; trap "exit 75" TERM; while :; do sleep 0.05; done'
    assert start_ranks(tmp_path, task).wait(timeout=30) == 7


def test_ranks_without_a_command_say_how() -> None:
    command = [sys.executable, "-m", "recipes.launch.ranks", "two"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=LAUNCH.parents[1])
    assert found.returncode == 2
    assert found.stderr.startswith("usage: python -m recipes.launch.ranks")
