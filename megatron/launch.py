"""Reads rank, world size, rendezvous address and secrets from the environment.

torchrun, DeepSpeed's launcher and Slurm's srun are understood. This module and `initialize.py` are
the only readers of `os.environ`. It imports no torch, so that errors of a command line can be
printed by one rank only, at once.
"""

import json
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.errors import ConfigError, PeerError

_WORKSPACES = (":4096:8", ":16:8")  # of cuBLAS, with which its results do not vary
_ACCOUNTS = "MEGATRON_ACCOUNTS"
API_KEY = "MEGATRON_API_KEY"  # of the server of text generation
_PORTS = range(12000, 32000)  # below those that systems hand out by themselves
CREDENTIAL_WORDS = r"(?:api[_-]?key|key|token|secret|password|passwd|credentials?|signature|sig)"
_SECRET_NAME = re.compile(rf"(?:^|[^a-z]){CREDENTIAL_WORDS}$", re.IGNORECASE)
_SHORTEST_SECRET = 6  # shorter ones, such as "1" or "true", are parts of ordinary words


@dataclass(frozen=True, slots=True)
class Launch:
    """One process among those that were started together.

    Attributes:
        has_rendezvous: whether a launcher set the address of the rendezvous.
        meets_at: HOST:PORT, where that is not in MASTER_ADDR and MASTER_PORT.
        has_own_device: of the devices of its node this process sees one, which no other rank has.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    has_rendezvous: bool = False
    meets_at: str | None = None
    has_own_device: bool = False

    @property
    def device_index(self) -> int:
        """Return the index of this process's device among those it can see."""
        return 0 if self.has_own_device else self.local_rank


def launch_from_environment(environment: Mapping[str, str] | None = None) -> Launch:
    """Read what torchrun, DeepSpeed's launcher or srun set; the first two win over Slurm.

    torchrun sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; DeepSpeed's launcher LOCAL_SIZE
    for the last; srun its own names, and no address.

    Raises:
        ConfigError: if only some of them are set, they are not consistent numbers, or a launcher
            started several processes without telling them so in a way that is known here.
    """
    given = os.environ if environment is None else environment
    if "RANK" not in given and "WORLD_SIZE" not in given:
        # In a batch script outside of srun there is one process, whatever SLURM_NTASKS is.
        if "SLURM_STEP_NUM_TASKS" in given:
            return _launch_of_srun(given)
        _refuse_mpi(given)
        return Launch()
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in given]
    if missing:
        raise ConfigError(
            "the launcher set only part of what ranks need to find each other",
            found="no " + ", no ".join(missing),
            fix="start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            "MASTER_PORT",
        )
    rank, world_size = _number(given, "RANK"), _number(given, "WORLD_SIZE")
    local_rank = _number(given, "LOCAL_RANK", rank)
    size = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in given), "")
    local_world_size = _number(given, size, world_size)
    return _consistent(
        Launch(rank, world_size, local_rank, local_world_size, has_rendezvous=True),
        f"RANK={rank} WORLD_SIZE={world_size} LOCAL_RANK={local_rank} "
        f"LOCAL_WORLD_SIZE={local_world_size}",
    )


def set_library_environment(launch: Launch) -> None:
    """Set LOCAL_RANK, which DeepSpeed reads, and keep the gloo of one process off the network.

    Variables that are set already stay as they are.
    """
    os.environ.setdefault("LOCAL_RANK", str(launch.device_index))
    if launch.world_size == 1:  # gloo listens even so, by default where the host's name leads
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def forget_variables(names: Iterable[str]) -> None:
    """Remove variables from the environment, which processes that this one starts will inherit.

    What the system shows of this process itself (/proc/PID/environ) is as it was started.
    """
    for name in names:
        os.environ.pop(name, None)


def report_to_torchrun(
    message: str, status: int, environment: Mapping[str, str] | None = None
) -> None:
    """Write why this process ends to the file that torchrun reads for its summary, if it named one.

    The summary calls the earliest failure the root cause, counting in whole seconds. So the failure
    of another rank, which is noticed within the second, is dated one second later.

    Raises:
        OSError: the file cannot be written.
    """
    path = (os.environ if environment is None else environment).get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    seconds = int(time.time()) + (status == PeerError.exit_code)
    # As torch.distributed.elastic.multiprocessing.errors.ErrorHandler writes it.
    extra = {"py_callstack": message, "timestamp": str(seconds)}
    record = {"message": {"message": message, "errorCode": status, "extraInfo": extra}}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(record, file)


def is_secret_name(name: str) -> bool:
    """Return whether a variable or a field of that name holds a key or a password."""
    return _SECRET_NAME.search(name) is not None


def secrets_in_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that hold keys, tokens and passwords (of six characters or more)."""
    given = os.environ if environment is None else environment
    return {
        name: value
        for name, value in given.items()
        if len(value) >= _SHORTEST_SECRET and is_secret_name(name)
    }


def api_key_from_environment(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the key that clients of a server have to send, as the environment has it."""
    return (os.environ if environment is None else environment).get(API_KEY)


def order_kernels(tensor_parallel_size: int) -> str | None:
    """Let CUDA start kernels in the order of their launches, where tensor parallelism needs it.

    The reduction of an input's gradient is launched before the matrix product that it overlaps.
    With several hardware queues the product may start first and take all processors, and the
    reduction runs after it. CUDA reads the variable when it is first used in a process.

    Returns:
        The value that CUDA_DEVICE_MAX_CONNECTIONS has instead of 1; None where there is no
        contradiction.
    """
    if tensor_parallel_size == 1:
        return None
    connections = os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return None if connections == "1" else connections


def fix_algorithms() -> None:
    """Let cuBLAS and NCCL take the same algorithms from run to run, for --deterministic-mode.

    cuBLAS needs workspaces of its own for that (its documentation, "Results Reproducibility").
    NCCL's sums in switches (NVLS) depend on the order of arrival. Both read the variables when
    they are first used in a process.

    Raises:
        ConfigError: CUBLAS_WORKSPACE_CONFIG is set to something else.
    """
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
    if workspace not in _WORKSPACES:
        raise ConfigError(
            "--deterministic-mode needs other workspaces of cuBLAS",
            found=f"CUBLAS_WORKSPACE_CONFIG={workspace}",
            fix=f"unset it, or set it to {' or '.join(_WORKSPACES)}",
        )
    os.environ.setdefault("NCCL_ALGO", "^NVLS")


def fair_threads(launch: Launch, environment: Mapping[str, str] | None = None) -> int | None:
    """Return the CPU threads of a rank that shares its node, where no variable sets their number.

    torchrun sets OMP_NUM_THREADS; DeepSpeed's launcher and srun leave each rank with all cores.
    None: it is set, or the rank has the node to itself.
    """
    given = os.environ if environment is None else environment
    shared = launch.has_rendezvous and launch.local_world_size > 1
    if not shared or "OMP_NUM_THREADS" in given or "MKL_NUM_THREADS" in given:
        return None
    cores = len(os.sched_getaffinity(0))
    if "SLURM_CPUS_PER_TASK" in given:
        # As given to sbatch; since Slurm 22.05 the tasks of srun may have been given fewer.
        return max(1, min(cores, _number(given, "SLURM_CPUS_PER_TASK")))
    return max(1, cores // launch.local_world_size)


def _launch_of_srun(given: Mapping[str, str]) -> Launch:
    world_size = _number(given, "SLURM_STEP_NUM_TASKS")
    if world_size == 1:
        return Launch()
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")
    missing = [name for name in names if name not in given]
    if missing:
        raise ConfigError(
            "srun set only some of the variables that a rank needs",
            found="no " + ", no ".join(missing),
            fix="start with srun inside of the job, and do not unset what it sets",
        )
    rank, local_rank = _number(given, "SLURM_PROCID"), _number(given, "SLURM_LOCALID")
    by_node, node = _tasks_per_node(given), _number(given, "SLURM_NODEID")
    local_world_size = by_node[node] if 0 <= node < len(by_node) else 0
    launch = Launch(
        rank,
        world_size,
        local_rank,
        local_world_size,
        has_rendezvous=True,
        meets_at=_rendezvous_address(given, nodes=len(by_node)),
        has_own_device=given.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1",
    )
    return _consistent(
        launch,
        f"SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS={world_size} SLURM_LOCALID={local_rank} "
        f"SLURM_NODEID={node} SLURM_STEP_TASKS_PER_NODE={given['SLURM_STEP_TASKS_PER_NODE']}",
    )


def _rendezvous_address(given: Mapping[str, str], *, nodes: int) -> str:
    """Return HOST:PORT of rank 0, equal for every task of a job step."""
    host = given.get("MASTER_ADDR")
    if host is None:
        nodelist = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST")
        if not nodelist:
            raise ConfigError(
                "ranks that srun started have no address for their rendezvous",
                found="no MASTER_ADDR, no SLURM_STEP_NODELIST",
                fix="export MASTER_ADDR with the name of the job's first node",
            )
        host = _first_host(nodelist)
    elif nodes > 1 and (host == "localhost" or host.startswith("127.")):
        raise ConfigError(
            "ranks on several nodes would each look for rank 0 on their own",
            found=f"MASTER_ADDR={host} on {nodes} nodes",
            fix="unset MASTER_ADDR: the first node of the job is taken then",
        )
    if "MASTER_PORT" in given:
        return f"{host}:{_number(given, 'MASTER_PORT')}"
    # Two jobs on one node, and two steps of one job, need different ports.
    job, step = (_number(given, f"SLURM_{name}_ID", 0) for name in ("JOB", "STEP"))
    return f"{host}:{_PORTS[(job + 997 * step) % len(_PORTS)]}"


def _first_host(nodelist: str) -> str:
    """Return the first of the hosts that Slurm writes as `node[003-006,010],login1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    assert first is not None  # noqa: S101  # invariant: the pattern matches nothing at least
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _tasks_per_node(given: Mapping[str, str]) -> list[int]:
    """Return how many tasks each node has, which Slurm writes as `4(x2),1`."""
    text, counts = given["SLURM_STEP_TASKS_PER_NODE"], []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(
                "srun gives the number of tasks per node in an unknown form",
                found=f"SLURM_STEP_TASKS_PER_NODE={text}",
                fix="start with torchrun on every node, and report this with your Slurm's version",
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _refuse_mpi(given: Mapping[str, str]) -> None:
    """Refuse mpirun, under which each of N processes would train alone."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if given.get(name, "1") != "1":
            raise ConfigError(
                "mpirun started several processes, without the variables that set their ranks",
                found=f"{name}={given[name]}, no RANK, no WORLD_SIZE",
                fix="start with torchrun, deepspeed or srun; or set RANK, WORLD_SIZE, LOCAL_RANK, "
                "MASTER_ADDR and MASTER_PORT for each process",
            )


def _consistent(launch: Launch, shown: str) -> Launch:
    if (
        0 <= launch.rank < launch.world_size
        and 0 <= launch.local_rank < launch.local_world_size <= launch.world_size
    ):
        return launch
    raise ConfigError(
        "the launcher's numbers contradict each other",
        found=shown,
        fix="let the launcher set them; unset any that were exported by hand",
    )


def _number(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = given.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            "the launcher set something that is not a number",
            found=f"{name}={text}",
            fix="let the launcher set it; unset it if it was exported by hand",
        ) from None


def rendezvous_address(
    launch: Launch, environment: Mapping[str, str] | None = None
) -> tuple[str, int]:
    """Return the host and the port at which the ranks of a launch meet.

    Raises:
        ConfigError: the variables name no port.
    """
    if launch.meets_at is not None:
        host, _, port = launch.meets_at.rpartition(":")
        return host, int(port)
    given = os.environ if environment is None else environment
    return given["MASTER_ADDR"], _number(given, "MASTER_PORT")


def hosts_rendezvous(launch: Launch, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this process hosts the store at the rendezvous; torchrun's agent may."""
    given = os.environ if environment is None else environment
    return launch.rank == 0 and given.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def accounts_folder(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the folder for the account of this start's time; None where nobody asks for one."""
    return (os.environ if environment is None else environment).get(_ACCOUNTS)


def environment_of_rank(rank: int, ranks: int, *, port: int, accounts: str) -> dict[str, str]:
    """Return the environment of one of `ranks` processes of this machine, as torchrun makes it.

    Args:
        port: of the rendezvous, which binds to the loopback interface's address.
        accounts: the folder for the account of this start's time.
    """
    cores = len(os.sched_getaffinity(0))
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        _ACCOUNTS: accounts,
    }
    threads = {"OMP_NUM_THREADS": str(max(1, cores // ranks))}
    return threads | dict(os.environ) | own


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
