"""What a launcher sets is read whole, or refused."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron import launch as environment
from megatron.errors import ConfigError, DataError, PeerError
from megatron.launch import (
    Launch,
    accounts_folder,
    environment_of_rank,
    fair_threads,
    fix_algorithms,
    forget_variables,
    hosts_rendezvous,
    launch_from_environment,
    order_kernels,
    rendezvous_address,
    report_to_torchrun,
    set_library_environment,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
# As DeepSpeed 0.19's launcher leaves the environment.
DEEPSPEED = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
DEEPSPEED |= {"LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
# Task 3 of 5 on two nodes, as srun of Slurm 23 leaves it.
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "gpu[007,010-012]",
    "SLURM_JOB_NODELIST": "gpu[001-012]",
}


def changed(given: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in (given | changes).items() if value is not None}


def test_no_launcher_is_one_process() -> None:
    assert launch_from_environment({}) == Launch()
    assert launch_from_environment({"LOCAL_RANK": "3"}) == Launch()


@pytest.mark.parametrize("given", [TORCHRUN, DEEPSPEED])
def test_torchrun_and_deepspeed_are_understood(given: dict[str, str]) -> None:
    launch = launch_from_environment(given)
    assert launch == Launch(5, 8, 1, 4, has_rendezvous=True)
    assert rendezvous_address(launch, given) == ("node0", 29500)
    assert launch.device_index == 1


def test_without_local_numbers_all_ranks_are_on_one_node() -> None:
    given = {name: value for name, value in TORCHRUN.items() if not name.startswith("LOCAL")}
    assert launch_from_environment(given) == Launch(5, 8, 5, 8, has_rendezvous=True)


def test_srun_is_understood_and_its_ranks_meet_on_the_first_node() -> None:
    launch = launch_from_environment(SRUN)
    assert launch == Launch(3, 5, 0, 2, has_rendezvous=True, meets_at="gpu007:16711")
    assert rendezvous_address(launch, {}) == ("gpu007", 16711)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login1", "login1"),
        ("login1,gpu[3-4]", "login1"),
        ("gpu[3-4],login1", "gpu3"),
        ("rack[01-02]-gpu[3,4]", "rack01-gpu3"),
        ("a-1.cluster.org,b", "a-1.cluster.org"),
    ],
)
def test_the_first_node_is_found_in_how_slurm_writes_them(nodes: str, first: str) -> None:
    launch = launch_from_environment(SRUN | {"SLURM_STEP_NODELIST": nodes})
    assert launch.meets_at == f"{first}:16711"


def test_what_is_exported_for_srun_wins() -> None:
    exported = SRUN | {"MASTER_ADDR": "gpu009", "MASTER_PORT": "6000"}
    assert launch_from_environment(exported).meets_at == "gpu009:6000"
    again = SRUN | {"SLURM_STEP_ID": "1"}
    assert launch_from_environment(again).meets_at != launch_from_environment(SRUN).meets_at


@pytest.mark.parametrize(("text", "size"), [("5", 5), ("2(x2),1", 2), ("1,4", 4), ("3(x1),2", 2)])
def test_the_tasks_of_a_node_are_counted(text: str, size: int) -> None:
    node = "0" if size == 5 else "1"
    given = SRUN | {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": node}
    assert launch_from_environment(given).local_world_size == size


def test_one_task_and_a_batch_script_are_one_process() -> None:
    assert launch_from_environment(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) == Launch()
    outside = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert launch_from_environment(outside) == Launch()


def test_torchrun_in_a_task_of_srun_wins() -> None:
    assert launch_from_environment(SRUN | TORCHRUN) == launch_from_environment(TORCHRUN)


@pytest.mark.parametrize(("gpus", "own"), [("1", True), ("a100:1", True), ("2", False)])
def test_a_task_with_a_gpu_of_its_own_takes_the_only_one_that_it_sees(gpus: str, own: bool) -> None:
    given = SRUN | {"SLURM_GPUS_PER_TASK": gpus, "SLURM_LOCALID": "1", "SLURM_PROCID": "4"}
    launch = launch_from_environment(given)
    assert (launch.has_own_device, launch.device_index) == (own, 0 if own else 1)


@pytest.mark.parametrize(
    ("changes", "problem", "found"),
    [
        ({"MASTER_PORT": None}, "only part of what ranks need", "no MASTER_PORT"),
        ({"WORLD_SIZE": None}, "only part of what ranks need", "no WORLD_SIZE"),
        ({"RANK": "five"}, "not a number", "RANK=five"),
        ({"LOCAL_RANK": ""}, "not a number", "LOCAL_RANK="),
        ({"RANK": "8"}, "contradict each other", "RANK=8 WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "contradict each other", "LOCAL_RANK=4 LOCAL_WORLD_SIZE=4"),
        ({"RANK": "-1"}, "contradict each other", "RANK=-1"),
        ({"LOCAL_WORLD_SIZE": "9"}, "contradict each other", "LOCAL_WORLD_SIZE=9"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    changes: dict[str, str | None], problem: str, found: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        launch_from_environment(changed(TORCHRUN, changes))
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "problem", "found"),
    [
        ({"SLURM_LOCALID": None}, "srun set only some", "no SLURM_LOCALID"),
        ({"SLURM_PROCID": "5"}, "contradict each other", "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=5"),
        ({"SLURM_NODEID": "2"}, "contradict each other", "SLURM_NODEID=2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3 2"}, "an unknown form", "PER_NODE=3 2"),
        ({"MASTER_ADDR": "127.0.0.1"}, "each look for rank 0 on their own", "on 2 nodes"),
        ({"MASTER_PORT": "port"}, "not a number", "MASTER_PORT=port"),
        (
            {"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": None},
            "no address for their rendezvous",
            "no MASTER_ADDR",
        ),
    ],
)
def test_what_srun_cannot_have_meant_is_refused(
    changes: dict[str, str | None], problem: str, found: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        launch_from_environment(changed(SRUN, changes))
    assert found in str(caught.value)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_mpirun_do_not_each_train_alone(name: str) -> None:
    with pytest.raises(ConfigError, match="mpirun started several") as caught:
        launch_from_environment({name: "4"})
    assert f"{name}=4" in str(caught.value)
    assert launch_from_environment({name: "1"}) == Launch()


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda _: set(range(10)))
    launch = launch_from_environment(DEEPSPEED)  # 4 on this node
    assert fair_threads(launch, DEEPSPEED) == 2
    assert fair_threads(launch, DEEPSPEED | {"OMP_NUM_THREADS": "3"}) is None
    assert fair_threads(Launch(), {}) is None
    # A task of srun may use what it was given, however many cores the node has.
    assert fair_threads(launch_from_environment(SRUN), SRUN | {"SLURM_CPUS_PER_TASK": "6"}) == 6
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda _: {0})
    assert fair_threads(launch, DEEPSPEED) == 1
    assert fair_threads(launch_from_environment(SRUN), SRUN | {"SLURM_CPUS_PER_TASK": "6"}) == 1


@pytest.mark.parametrize(
    ("size", "given", "expected", "contradiction"),
    [
        (1, {}, {}, None),
        (1, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, None),
        (2, {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, None),
        (2, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, None),
        (2, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "8"),
    ],
)
def test_tensor_parallelism_orders_kernels_unless_a_variable_contradicts_it(
    size: int,
    given: dict[str, str],
    expected: dict[str, str],
    contradiction: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment.os, "environ", given)
    assert order_kernels(size) == contradiction
    assert given == expected


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_algorithms_are_fixed_where_no_variable_does(
    workspace: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {} if workspace is None else {"CUBLAS_WORKSPACE_CONFIG": workspace, "NCCL_ALGO": "Ring"}
    monkeypatch.setattr(environment.os, "environ", given)
    fix_algorithms()
    assert given == {
        "CUBLAS_WORKSPACE_CONFIG": workspace or ":4096:8",
        "NCCL_ALGO": "Ring" if workspace else "^NVLS",
    }


def test_workspaces_with_which_results_vary_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.os, "environ", {"CUBLAS_WORKSPACE_CONFIG": ":0:0"})
    with pytest.raises(ConfigError, match=r"other workspaces(.|\n)*CONFIG=:0:0(.|\n)*fix: unset"):
        fix_algorithms()


def test_libraries_are_told_the_local_rank_unless_they_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: dict[str, str] = {}
    monkeypatch.setattr(environment.os, "environ", told)
    set_library_environment(launch_from_environment(SRUN | {"SLURM_LOCALID": "1"}))
    assert told == {"LOCAL_RANK": "1"}
    set_library_environment(Launch())
    assert told == {"LOCAL_RANK": "1", "GLOO_SOCKET_IFNAME": "lo"}
    told["GLOO_SOCKET_IFNAME"] = "eth0"
    set_library_environment(Launch())
    assert told["GLOO_SOCKET_IFNAME"] == "eth0"


def test_variables_that_are_forgotten_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    forget_variables(("WANDB_API_KEY", "COMET_API_KEY"))
    child = subprocess.run(["cat", "/proc/self/environ"], capture_output=True, check=True)
    assert b"WANDB_API_KEY" not in child.stdout


def test_secrets_are_variables_whose_name_ends_in_a_word_for_them() -> None:
    hidden = {"WANDB_API_KEY": "f4ke-key", "HF_TOKEN": "f4ke-token", "PASSWORD": "hunter22"}
    hidden |= {"AWS_SECRET_ACCESS_KEY": "f4ke-key", "CLIENT_SECRET": "f4ke-secret"}
    shown = {"TOKENIZERS_PARALLELISM": "disabled", "MONKEY": "banana", "KEYBOARD": "english"}
    shown |= {"API_KEY": "short", "MY_TOKEN": ""}  # part of too many words, and of all
    assert environment.secrets_in_environment(hidden | shown) == hidden


def test_torchrun_is_told_of_a_failure_and_that_of_another_rank_is_dated_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.9)
    seconds = []
    for status in (DataError.exit_code, PeerError.exit_code):
        file = tmp_path / str(status)
        report_to_torchrun("x\n  fix: y", status, {"TORCHELASTIC_ERROR_FILE": str(file)})
        record = json.loads(file.read_text())["message"]
        assert (record["message"], record["errorCode"]) == ("x\n  fix: y", status)
        seconds.append(record["extraInfo"]["timestamp"])
    assert seconds == ["1000", "1001"]
    report_to_torchrun("x", 1, {})


def test_what_torchrun_reads_is_what_it_shows(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    report_to_torchrun("wrong\n  fix: mend it", 64, {"TORCHELASTIC_ERROR_FILE": str(file)})
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=64, error_file=str(file))
    shown = ChildFailedError("pretrain_gpt.py", {0: failure}).format_msg()
    assert "traceback : wrong\n    fix: mend it\n" in shown
    assert "To enable traceback" not in shown


def test_rank_0_hosts_the_rendezvous_unless_torchruns_agent_does() -> None:
    assert hosts_rendezvous(Launch(0, 2), {})
    assert not hosts_rendezvous(Launch(1, 2), {})
    assert not hosts_rendezvous(Launch(0, 2), {"TORCHELASTIC_USE_AGENT_STORE": "True"})


def test_the_environment_of_a_rank_is_read_as_that_of_a_launcher() -> None:
    given = environment_of_rank(1, 4, port=6001, accounts="there")
    launch = launch_from_environment(given)
    assert launch == Launch(1, 4, 1, 4, has_rendezvous=True)
    assert rendezvous_address(launch, given) == ("127.0.0.1", 6001)
    assert accounts_folder(given) == "there"
    assert accounts_folder({}) is None
    assert "PATH" in given, "what the supervisor has is handed on"
