"""initialize_megatron(): from a command line to a process that may start training.

The order is the point: flags, then checks that need no process group, then groups, then whether
all ranks agree. A step that fails undoes what came before it, so that a retry starts clean.
"""

import hashlib
import json
import os
import platform
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed's own, untyped there
    HashStore,
    PrefixStore,
    Store,
)

import megatron
from megatron import device, host, log, program
from megatron.arguments import CommandLineError, ExtraArgsProvider, parse_args
from megatron.config.deepspeed.plan import recorded_json
from megatron.config.run import RunConfig
from megatron.config.runtime import DeviceKind, LaunchConfig
from megatron.data.kinds.program_data import GPT_DATA, ProgramData
from megatron.errors import ConfigError, MachineError, MegatronError, PreflightError
from megatron.global_vars import (
    Runtime,
    clear_runtime,
    get_runtime,
    refuse_second_initialisation,
    set_runtime,
)
from megatron.launch import (
    Launch,
    fair_threads,
    fix_algorithms,
    forget_variables,
    hosts_rendezvous,
    launch_from_environment,
    order_kernels,
    rendezvous_address,
    secrets_in_environment,
    set_library_environment,
)
from megatron.mpu.context import ParallelContext
from megatron.mpu.initialize import destroy_model_parallel, initialize_groups
from megatron.mpu.random import RandomStreams, hash_seed
from megatron.ops.cpu_memory import keep_tensors_together
from megatron.ops.cpu_products import take_faster_fp32_library
from megatron.peers.activity import Activity
from megatron.peers.handshake import Member, meet, rendezvous_store
from megatron.peers.stacks import ProcessName
from megatron.peers.stall import StallLimits
from megatron.peers.watch import PeerWatch
from megatron.preflight.agreement import agree_on_launch
from megatron.preflight.checks import CHECKS
from megatron.preflight.probe import dtypes_of, probe_machine
from megatron.preflight.run import Check, RunPlan, collect_findings, run_preflight
from megatron.preflight.source import source_digests
from megatron.timers import Timers
from megatron.tokenizer.tokenizer import Tokenizer, TokenizerSpec
from megatron.trackers.reporting import secrets_not_needed

_FILLS = "fill_uninitialized_memory"  # a property that torch's types leave out
_ON_SHUTDOWN: list[Callable[[], None]] = []  # what this module joined or started, oldest first
_SILENT_S = 8.0  # without a sign of life of a rank, before the run ends
_NOTIFY_S = 10.0  # how long a rank that cannot start tries to reach the others, to send the reason


def initialize_megatron(
    config: RunConfig | None = None,
    *,
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, object] | None = None,
    checks: tuple[Check, ...] = CHECKS,
    reads: ProgramData = GPT_DATA,
) -> Runtime:
    """Parse flags, run the checks, make the parallel groups and seed every generator.

    Args:
        config: an already parsed run; the command line is read when not given.
        checks: what is checked before groups exist (programs that do not train need fewer).
        reads: what the program makes of the flags about data.

    A default process group that exists already is used as it is.

    Raises:
        PreflightError: with everything that is wrong with this launch.
        NotInitialisedError: if this process is initialised already.
    """
    site = _caller()
    refuse_second_initialisation(site)
    log.hide(secrets_in_environment().values())  # before any of them is removed
    launch = launch_of_process()
    log.configure(launch.rank, launch.world_size)
    if config is None:
        try:
            config = parse_args(
                extra_args_provider=extra_args_provider, args_defaults=args_defaults
            )
        except CommandLineError as wrong:
            raise with_findings_of_checks(wrong, checks, reads=reads) from None
    logging = config.logging
    log.configure(
        launch.rank,
        launch.world_size,
        level=logging.log_level,
        replica_level=logging.log_level_replica,
    )
    _choose_threads(config, launch)
    forget_variables(secrets_not_needed(config, launch.rank, launch.world_size))
    # Before the checks, which ask CUDA for its devices.
    connections = order_kernels(config.parallel.tensor_model_parallel_size)
    plan = run_plan(config, launch, reads)
    notify = partial(_notify_waiting_ranks, launch)
    _ON_SHUTDOWN.append(program.on_failure(notify))
    run_preflight(plan, checks)
    tokenizer = plan.tokenizer
    if tokenizer is None:
        raise (
            plan.tokenizer_error or AssertionError
        )  # invariant: tokenizer_can_be_built reported it
    with ExitStack() as undo:
        kind, ranks_of_host = _device_kind(config.launch.device), launch.local_world_size
        device.select(kind, launch.device_index, ranks_of_host=ranks_of_host)
        if kind == "cpu":
            host.keep_freed_memory()
            _ON_SHUTDOWN.append(keep_tensors_together())
            _ON_SHUTDOWN.append(_take_faster_fp32_library(config))
        set_library_environment(launch)
        if config.training.deterministic_mode:
            _use_deterministic_algorithms()
        _ON_SHUTDOWN.append(partial(device.allow_bf16_partial_sums, device.has_bf16_partial_sums()))
        device.allow_bf16_partial_sums(config.training.bf16_reduced_precision_matmul)
        _warn_of_order(connections)
        activity = Activity(device.peak_memory_bytes)
        have_met = launch.world_size > 1 and not dist.is_initialized()  # once they have joined
        context = _join(config, launch, undo, activity)
        # Unchecked: ranks with different --check-collectives must be able to report it.
        unchecked = replace(context.world, observer=None)
        if not have_met:
            agree_on_launch(_facts(config, launch), unchecked)
        probe_machine(dtypes_of(config.precision), unchecked)
        seed_default_generators(config.training.seed, context)
        streams = RandomStreams(config.training.seed)
        # Without waiting for the device, kernels would be timed by how fast they are launched.
        timers = Timers(synchronize=logging.log_timers_to_tensorboard)
        runtime = Runtime(
            config,
            launch,
            context,
            streams,
            tokenizer,
            timers,
            site,
            process=os.getpid(),
            activity=activity,
        )
        set_runtime(runtime)
        undo.pop_all()
    return runtime


def end_peer_watch() -> None:
    """Let the end of other ranks concern this one no more; all ranks call this together.

    For programs whose ranks compute without each other from then on.
    """
    for watch in _peer_watches():
        watch.close()


def tell_of_peers(on_failure: Callable[[MegatronError], None]) -> None:
    """Have the failure of another rank told before it ends this process (`PeerWatch.tell`)."""
    for watch in _peer_watches():
        watch.tell(on_failure)


def _peer_watches() -> list[PeerWatch]:
    owners = [getattr(leave, "__self__", None) for leave in _ON_SHUTDOWN]
    return [owner for owner in owners if isinstance(owner, PeerWatch)]


def with_findings_of_checks(
    wrong: CommandLineError,
    checks: tuple[Check, ...] = CHECKS,
    *,
    reads: ProgramData = GPT_DATA,
    launch: Launch | None = None,
) -> PreflightError:
    """Return a command line's errors, with findings of the checks for its readable part.

    A user who mistyped a flag then learns of a missing file at the same start.

    Args:
        launch: the ranks of the run; None: those of this process.
    """
    if wrong.config is None:
        return wrong
    plan = run_plan(wrong.config, launch or launch_of_process(), reads)
    # DeepSpeed's file is read by both.
    reported = {str(finding.error) for finding in wrong.findings}
    more = [each for each in collect_findings(plan, checks) if str(each.error) not in reported]
    return PreflightError([*wrong.findings, *more])


def shutdown_megatron() -> None:
    """Leave the process groups and clear the runtime, so that a new one may be made.

    A process group that was there before `initialize_megatron` belongs to the caller, and stays.
    """
    while _ON_SHUTDOWN:
        _ON_SHUTDOWN.pop()()
    clear_runtime()


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """Build the tokenizer that the flags name."""
    return TokenizerSpec.of(config.tokenizer).build()


def run_plan(config: RunConfig, launch: Launch, reads: ProgramData = GPT_DATA) -> RunPlan:
    """Return what the checks take, with the tokenizer or the error of building it."""
    try:
        return RunPlan(config, launch, tokenizer_of(config), reads=reads)
    except MegatronError as error:
        return RunPlan(config, launch, None, error, reads)


def seed_default_generators(seed: int, context: ParallelContext) -> None:
    """Seed the default generators of Python, NumPy and torch: equal over tp alone."""
    at = context.coord
    own_seed = hash_seed(seed, "process", at.pp, at.dp, *([at.cp] if at.cp else []))
    random.seed(own_seed)
    np.random.seed(own_seed % 2**32)
    torch.manual_seed(own_seed)


def is_initialised() -> bool:
    """Return whether `initialize_megatron` has run in this process."""
    try:
        get_runtime()
    except MegatronError:
        return False
    return True


def launch_of_process() -> Launch:
    """Return this process's rank from the launcher or an existing process group.

    Without a launcher, the ranks of such a group are taken to be on one node.
    """
    launch = launch_from_environment()
    if not dist.is_initialized():
        return launch
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if not launch.has_rendezvous:
        return Launch(rank, world_size, rank, world_size)
    if (launch.rank, launch.world_size) != (rank, world_size):
        raise ConfigError(
            "the launcher and the process group that is there already disagree",
            found=f"RANK={launch.rank} WORLD_SIZE={launch.world_size}, the group has this process "
            f"as rank {rank} of {world_size}",
            fix="let initialize_megatron() make the process group, or make it from RANK and "
            "WORLD_SIZE",
        )
    return launch


def _choose_threads(config: RunConfig, launch: Launch) -> None:
    """Set the number of CPU threads; by default the ranks of a node share its cores."""
    wanted, fair = config.training.num_threads, fair_threads(launch)
    if wanted is None and fair is not None:
        log.info(
            f"{fair} CPU {'thread' if fair == 1 else 'threads'} for each of the "
            f"{launch.local_world_size} ranks of this node, which share its cores: the launcher "
            "set no OMP_NUM_THREADS (--num-threads sets another number)"
        )
    threads = wanted or fair
    if threads is not None:
        torch.set_num_threads(threads)


def _take_faster_fp32_library(config: RunConfig) -> Callable[[], None]:
    return take_faster_fp32_library(
        tokens=config.data.seq_length // config.parallel.context_parallel_size,
        hidden_size=config.model.hidden_size,
        head_width=config.model.head_width,
    )


def _warn_of_order(connections: str | None) -> None:
    """Warn on a GPU that CUDA_DEVICE_MAX_CONNECTIONS is not 1 but `connections`, if it is."""
    if connections is not None and device.current().type == "cuda":
        log.warning(
            f"CUDA_DEVICE_MAX_CONNECTIONS is {connections}, and tensor parallelism overlaps "
            "reductions with matrix products only if it is 1: a reduction may wait for the product "
            "that was launched after it. Unset the variable, or set it to 1; results do not depend "
            "on it"
        )


def _device_kind(wanted: DeviceKind) -> str:
    if wanted is DeviceKind.AUTO:
        return "cuda" if device.cuda_is_available() else "cpu"
    return wanted.value


def _join(
    config: RunConfig, launch: Launch, undo: ExitStack, activity: Activity
) -> ParallelContext:
    """Join the other ranks and make the groups; a single process has groups too."""
    timeout = timedelta(minutes=config.launch.distributed_timeout_minutes)
    chosen = config.launch.distributed_backend
    backend = chosen.value if chosen else ("nccl" if device.current().type == "cuda" else "gloo")
    undo.callback(shutdown_megatron)
    try:
        # The watch is there first: a rank that fails its checks will never join the group.
        watch = _watch(config.launch, launch, undo, activity)
        if not dist.is_initialized():
            if watch is not None:
                _meet(config, launch, watch)
            _make_world(launch, backend, timeout, watch)
            _ON_SHUTDOWN.append(dist.destroy_process_group)
    except (RuntimeError, ValueError) as error:
        raise MachineError(
            "the ranks could not find each other",
            found=f"{launch.world_size} ranks over {backend}: {error}",
            fix="check MASTER_ADDR, MASTER_PORT and the network between the nodes",
        ) from error
    _ON_SHUTDOWN.append(destroy_model_parallel)
    if watch is not None:
        _ON_SHUTDOWN.extend([program.on_failure(partial(_notify, watch)), watch.close])
    measures_waits = bool(config.logging.straggler_report_interval)
    return initialize_groups(config.parallel, timeout, activity if measures_waits else None)


def _watch(
    config: LaunchConfig, launch: Launch, undo: ExitStack, activity: Activity
) -> PeerWatch | None:
    """Return the watch that ends this process when another rank fails; None for one process."""
    if launch.world_size == 1:
        return None
    here, timeout = dist.is_initialized(), timedelta(minutes=config.distributed_timeout_minutes)
    store = dist.distributed_c10d._get_default_store() if here else _rendezvous(launch, timeout)
    watch = PeerWatch(
        store,
        launch.rank,
        launch.world_size,
        activity=activity,
        limits=_stall_limits(config),
    )
    undo.callback(watch.close)
    return watch


def _stall_limits(config: LaunchConfig) -> StallLimits | None:
    if not config.stall_timeout:
        return None
    collective_s = 60 * config.distributed_timeout_minutes
    if config.stall_exit_timeout is None:
        return StallLimits(config.stall_timeout, _SILENT_S, collective_s, collective_s)
    ended = config.stall_exit_timeout or None
    return StallLimits(config.stall_timeout, ended, ended, collective_s)


def _rendezvous(launch: Launch, timeout: timedelta) -> Store:
    """Return the store that all ranks of this launch share."""
    store = rendezvous_store(
        rendezvous_address(launch),
        is_host=hosts_rendezvous(launch),
        within_s=timeout.total_seconds(),
    )
    store.set_timeout(timeout)
    return PrefixStore("default_pg", store)


def _meet(config: RunConfig, launch: Launch, watch: PeerWatch) -> None:
    """Wait until all ranks are there, and raise on all of them if one does not belong to them."""
    own = Member(launch.rank, launch.world_size, ProcessName.own(), _facts(config, launch))
    meet(watch.store, own, 60 * config.launch.distributed_timeout_minutes)


def _make_world(launch: Launch, backend: str, timeout: timedelta, watch: PeerWatch | None) -> None:
    store: Store = HashStore()
    if watch is not None:
        store = watch.store
    elif launch.has_rendezvous:
        store = _rendezvous(launch, timeout)
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )


def _notify_waiting_ranks(launch: Launch, reason: str) -> None:
    """Join the other ranks only to report an error that they may not have found."""
    if launch.world_size == 1 or dist.is_initialized():
        return
    try:
        store = _rendezvous(launch, timedelta(seconds=_NOTIFY_S))
        _notify(PeerWatch(store, launch.rank, launch.world_size), reason)
    except (RuntimeError, ValueError):
        log.debug("no other rank was notified of this failure")


def _notify(watch: PeerWatch, reason: str) -> None:
    """Announce a failure, and wait until the other ranks have read it."""
    watch.announce(reason)
    watch.close()


def _facts(config: RunConfig, launch: Launch) -> dict[str, str]:
    """Return what has to be equal on all ranks."""
    replicas = RunPlan(config, launch).data_parallel_size or 1
    given = json.dumps(recorded_json(config, data_parallel_size=replicas), sort_keys=True)
    return {
        "flags": config.fingerprint(),
        "DeepSpeed's JSON": hashlib.sha256(given.encode()).hexdigest()[:16],
        "megatron": megatron.__version__,
        **source_digests(),
        "torch": torch.__version__,
        **device.library_versions(),
        "python": platform.python_version(),
        "byte order": sys.byteorder,
    }


def _use_deterministic_algorithms() -> None:
    """Let torch raise where an operation has no deterministic kernel, until the shutdown."""
    fix_algorithms()
    fills = bool(getattr(torch.utils.deterministic, _FILLS))
    enabled = torch.are_deterministic_algorithms_enabled()
    _ON_SHUTDOWN.append(partial(_set_determinism, enabled, fills))
    # Memory that is filled before its first use costs time, and changes no result.
    _set_determinism(True, False)


def _set_determinism(enabled: bool, fills: bool) -> None:
    torch.use_deterministic_algorithms(enabled)
    setattr(torch.utils.deterministic, _FILLS, fills)


def _caller() -> str:
    """Return file:line of the caller of initialize_megatron, for the error of a second call."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
