"""Stands in for Slurm's srun on one machine: starts tasks with the variables that srun sets.

`python srun.py [--nodes=N] [--ntasks-per-node=N] [other options] program words...`; every node is
this machine, by several names. As with --kill-on-bad-exit=1, a task that fails ends the others.
"""

import os
import subprocess
import sys
import time

_POLL_S = 0.05


def main(words: list[str]) -> int:
    """Run the tasks and return the worst of their statuses."""
    options: dict[str, str] = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        options[name] = value
    nodes, each = int(options.get("--nodes", "2")), int(options.get("--ntasks-per-node", "1"))
    tasks = [
        subprocess.Popen(words, env=os.environ | _slurm_variables(node, local, nodes, each))
        for node in range(nodes)
        for local in range(each)
    ]
    while any(task.poll() is None for task in tasks):
        if any(task.poll() for task in tasks):
            for task in tasks:
                task.terminate()
        time.sleep(_POLL_S)
    return max(abs(task.wait()) for task in tasks)


def _slurm_variables(node: int, local: int, nodes: int, each: int) -> dict[str, str]:
    """The environment of one task."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),  # so that two jobs at once meet at two ports
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(nodes * each),
        "SLURM_STEP_NUM_TASKS": str(nodes * each),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})" if nodes > 1 else str(each),
        "SLURM_STEP_NODELIST": "localhost,ip6-localhost"[: None if nodes > 1 else 9],
        "SLURM_PROCID": str(node * each + local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
