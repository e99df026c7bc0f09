"""torchrun with the exit status of the rank that failed first, where torchrun always ends with 1.

`python examples/torchrun.py` takes the arguments of torchrun. It prints the summary of the failures
without the traceback of torchrun itself. After a signal it ends with 128 plus the signal's number.
"""

import sys

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main as torchrun

from megatron.errors import MachineError

_SIGNALS = 128  # what shells add to the signal that ended a process


def main(argv: list[str] | None = None) -> int:
    """Run torchrun and return the status to end with."""
    try:
        torchrun(argv)
    except ChildFailedError as failed:
        print(failed, file=sys.stderr, flush=True)
        status = failed.get_first_failure()[1].exitcode
        return status if status >= 0 else _SIGNALS - status
    except SignalException as ended:
        return _SIGNALS + ended.sigval
    except (DistError, RendezvousError) as unreachable:
        print(f"torchrun could not reach the other nodes: {unreachable}", file=sys.stderr)
        return MachineError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
