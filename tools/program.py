"""How every program in tools/ ends: a message for people, and an exit code for schedulers."""

from collections.abc import Callable

from megatron import log
from megatron.errors import MegatronError


def run(main: Callable[[], None]) -> None:
    """Call `main` and leave with the exit code of the error that stopped it, if one did.

    An error that is no MegatronError is a defect of ours: it keeps its traceback and exit code 1.
    """
    try:
        main()
    except MegatronError as error:
        log.error(str(error))
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt as error:
        log.error("interrupted")
        raise SystemExit(130) from error  # 128 + SIGINT, as shells count
