"""Runs a bash script so that what it would start is written down instead.

The script runs on a copy of its folder, with stand-ins for launchers on the PATH beside a few
programs that only read. What else it calls is skipped and listed. A guard (BASH_ENV, so that it
holds in every bash below, too) does the same with programs that are called by their path. This
keeps honest scripts from training, deleting and downloading; it is no prison for hostile ones.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megatron.errors import ConfigError

LAUNCHERS = ("python", "python3", "torchrun", "deepspeed", "accelerate")
_TASKS = ("srun", "mpirun", "mpiexec", "jsrun")  # each starts what stands behind it many times
_BEFORE_OTHERS = (
    *_TASKS,
    "sbatch",
    "nohup",
    "env",
    "numactl",
    "time",
    "timeout",
)
_READERS = (
    *("basename", "cat", "cut", "date", "dirname", "expr", "grep", "head", "hostname", "id", "ls"),
    *("nproc", "readlink", "realpath", "seq", "sort", "tail", "tr", "uname", "uniq", "wc", "awk"),
    *("whoami", "xargs", "paste", "od", "bc", "bash"),
)
_COPIED_SUFFIXES = ("", ".sh", ".slurm", ".sbatch", ".json", ".yaml", ".yml", ".txt", ".env")
_MOST_BYTES = 1 << 20  # of a file that is copied: scripts and configs are small
_PROGRAMS = (
    *("pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py", "pretrain_prefix_lm.py"),
    "pretrain_ict.py",
    "pretrain_vit.py",
    "finetune_t0_non_causal_decoder.py",
)
_SHOWN = 200  # characters of a call that was skipped
GPUS = 8  # that a node seems to have

# Stand-ins are privileged (-p), so that the guard is not over them.
_RECORD = """#!{bash} -p
# Writes down how it was called: the number of arguments, whether it is one of several tasks, its
# name, the folder, the arguments.
printf '%s\\0' "$#" "${{LAUNCH_TASKS-}}" "${{0##*/}}" "$PWD" "$@" >> "$LAUNCH_RECORDS"
"""
# Runs what stands behind its own options: another launcher, a shell, or a script; sbatch also one
# that it reads.
_HAND_ON = """#!{bash} -p
[[ " {tasks} " == *" ${{0##*/}} "* ]] && export LAUNCH_TASKS=1
for word in "$@"; do
  case "${{word##*/}}" in
    {programs}|bash|sh) exec "${{word##*/}}" "${{@:2}}" ;;
    *.sh) exec bash "$@" ;;
    *.py) exec python "$@" ;;
  esac
  shift
done
[[ "${{0##*/}}" != sbatch ]] || exec bash
"""
# extdebug, by which a trap can skip a command, is set late: at its start bash would look for its
# debugger.
_GUARD = r"""
set -o noclobber -o functrace
command_not_found_handle() {
  printf '%s\0' "$*" >> "$LAUNCH_SKIPPED"
}
_skip() {
  printf '%s\0' "$BASH_COMMAND" >> "$LAUNCH_SKIPPED"
}
# Of `NAME=value NAME='other value' command`, one assignment before the command.
_assignment="^[A-Za-z_][A-Za-z_0-9]*=(\"[^\"\`(]*\"|'[^']*'|[^[:space:]\"'\`(])*[[:space:]]+"
# Succeeds where a command is skipped, or another one has run in its place.
_is_replaced() {
  shopt -s extdebug
  local call="$BASH_COMMAND" before="" first rest
  local -a words
  while [[ "$call" =~ $_assignment ]]; do
    before+="${BASH_REMATCH[0]}"
    call="${call#"${BASH_REMATCH[0]}"}"
  done
  [[ "$call" =~ ^(exec|command)[[:space:]]+([^-\<\>].*)$ ]] && call="${BASH_REMATCH[2]}"
  words=()
  while [[ "$call" && ! "${words[*]-}" ]]; do  # what stands first may expand to nothing
    first="${call%%[[:space:]]*}" rest="${call#"${call%%[[:space:]]*}"}"
    call="${rest#"${rest%%[![:space:]]*}"}"
    case "$first" in
      cd) eval "$BASH_COMMAND" 2> /dev/null; return 0 ;;
      source|.)
        eval "words=($rest)"
        [[ -r "${words[0]}" && "$(realpath "${words[0]}")" == "$LAUNCH_FOLDER"/* ]] && return 1
        _skip; return 0 ;;
      *=*|*'('*|*'`'*) return 1 ;;
      *'$'*|\"*|\'*) eval "words=($first)" 2> /dev/null || { _skip; return 0; } ;;
      *) words=("$first") ;;
    esac
  done
  [[ "${words[0]-}" == */* ]] || return 1
  local base="${words[0]##*/}"
  if [[ -x "$LAUNCH_BIN/$base" ]]; then words[0]="$base"
  elif [[ "$base" == *.sh && -r "${words[0]}" ]]; then words=(bash "${words[@]}")
  elif [[ "$base" == *.py ]]; then words=(python "${words[@]}")
  else _skip; return 0; fi
  eval "$before \"\${words[@]}\" $rest"
  return 0
}
# With the arguments that the command sees, and a status that `set -e` takes for no failure.
trap '! _is_replaced "$@"' DEBUG
"""


class EndlessScriptError(ConfigError):
    """A script was ended, since it did not end by itself."""


class LauncherCall(NamedTuple):
    """A launcher as the script called it."""

    name: str
    folder: str
    arguments: tuple[str, ...]
    is_task: bool = False  # started by srun or its like, as often as that was asked to


class Recorded(NamedTuple):
    """What a script did: the launchers it called, what was skipped, and how it ended."""

    calls: tuple[LauncherCall, ...]
    skipped: tuple[str, ...]
    status: int
    said: str  # the end of what it printed


@contextmanager
def recorded(
    script: Path, arguments: Sequence[str] = (), *, seconds: float = 30
) -> Iterator[Recorded]:
    """Run a script, and yield what it did; files that it has written exist inside the block.

    Args:
        seconds: after which it is ended.

    Raises:
        ConfigError: there is no such script, or no bash on this machine.
        EndlessScriptError: it does not end.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError(
            "launch scripts are read by bash", found="no bash on the PATH", fix="install bash"
        )
    if not script.is_file():
        raise ConfigError("there is no such script", found=script, fix="name a file, or a folder")
    with tempfile.TemporaryDirectory() as place:
        root = Path(place).resolve()
        folder, tools, guard = (
            root / "run" / script.resolve().parent.name,
            root / "bin",
            root / "guard",
        )
        _copy(script.resolve().parent, folder)
        shutil.copy(script, folder / script.name)
        for program in _PROGRAMS:  # scripts look whether they stand in their repository
            (folder / program).touch()
        _put_stand_ins(tools, bash)
        guard.write_text(_GUARD)
        calls, skipped = root / "calls", root / "skipped"
        environment = {
            **_slurm_environment(script.read_text(errors="replace")),
            "PATH": str(tools),
            "HOME": str(root),
            "USER": "user",
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            "BASH_ENV": str(guard),
            "LAUNCH_BIN": str(tools),
            "LAUNCH_FOLDER": str(folder),
            "LAUNCH_RECORDS": str(calls),
            "LAUNCH_SKIPPED": str(skipped),
        }
        status, said = _run([bash, script.name, *arguments], folder, environment, seconds)
        yield Recorded(tuple(_calls_in(calls)), tuple(_skipped_in(skipped)), status, said)


def _run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float
) -> tuple[int, str]:
    process = subprocess.Popen(  # the script that the user names, among stand-ins
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise EndlessScriptError(
            "a launch script does not end",
            found=f"{command[1]} after {seconds:.0f} s",
            fix="take out what waits for something, or give a longer --seconds",
        ) from None
    return process.returncode, printed.decode(errors="replace")[-2000:].strip()


def _copy(source: Path, target: Path) -> None:
    """Copy the small files beside a script that it may read or call, and gpt-neox's configs."""
    target.mkdir(parents=True)
    for path in (*source.iterdir(), *source.glob("configs/**/*.yml")):
        is_small = path.is_file() and path.stat().st_size <= _MOST_BYTES
        if is_small and path.suffix in _COPIED_SUFFIXES:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _put_stand_ins(tools: Path, bash: str) -> None:
    tools.mkdir()
    stand_ins = {name: _RECORD.format(bash=bash) for name in LAUNCHERS}
    programs = "|".join((*LAUNCHERS, *_BEFORE_OTHERS))
    passing = _HAND_ON.format(bash=bash, programs=programs, tasks=" ".join(_TASKS))
    stand_ins |= dict.fromkeys(_BEFORE_OTHERS, passing)
    stand_ins["tee"] = f"#!{bash} -p\ncat\n"
    stand_ins["sleep"] = stand_ins["mkdir"] = f"#!{bash} -p\n"
    stand_ins["sh"] = f'#!{bash} -p\nexec bash "$@"\n'  # another shell would not be guarded
    stand_ins["nvidia-smi"] = f"#!{bash} -p\nfor i in {{1..{GPUS}}}; do echo 'a GPU'; done\n"
    stand_ins["scontrol"] = f"#!{bash} -p\necho node0\n"
    # It may edit files in place.
    sed = shutil.which("sed")
    stand_ins["sed"] = f'#!{bash} -p\n[[ " $* " == *" -i"* ]] || exec {sed} "$@"\n'
    for name, text in stand_ins.items():
        path = tools / name
        path.write_text(text)
        path.chmod(0o755)
    for name in _READERS:
        real = shutil.which(name)
        if real is not None:
            (tools / name).symlink_to(real)


def _slurm_environment(text: str) -> dict[str, str]:
    """Return what Slurm would tell a batch script of its #SBATCH lines, on its first node."""
    asked = dict(re.findall(r"^#SBATCH\s+--([a-z-]+)[= ](\S+)", text, flags=re.MULTILINE))
    if not asked:
        return {}
    nodes = re.match(r"\d+", asked.get("nodes", "1"))
    count = int(nodes[0]) if nodes else 1
    tasks = re.match(r"\d+", asked.get("ntasks-per-node", "1"))
    per_node = int(tasks[0]) if tasks else 1
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_JOBID": "1",
        "SLURM_JOB_NAME": asked.get("job-name", "job"),
        "SLURM_NNODES": str(count),
        "SLURM_JOB_NUM_NODES": str(count),
        "SLURM_NTASKS": str(count * per_node),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_JOB_NODELIST": "node0",
        "SLURM_NODELIST": "node0",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_GPUS_ON_NODE": str(GPUS),
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_SUBMIT_DIR": ".",
    }


def _calls_in(records: Path) -> Iterator[LauncherCall]:
    words = iter(_words_in(records))
    for count in words:
        task, name, folder = next(words), next(words), next(words)
        arguments = tuple(next(words) for _ in range(int(count)))
        yield LauncherCall(name, folder, arguments, is_task=bool(task))


def _skipped_in(records: Path) -> Iterator[str]:
    for call in dict.fromkeys(_words_in(records)):
        line = " ".join(call.split())
        yield line if len(line) <= _SHOWN else line[:_SHOWN] + " ..."


def _words_in(records: Path) -> list[str]:
    if not records.exists():
        return []
    return records.read_bytes().decode(errors="replace").split("\0")[:-1]
