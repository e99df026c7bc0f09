"""RunPlan and the list of checks: everything that can be known to be wrong before training starts.

A check is a function from a `RunPlan` to errors, and its name is its title. All checks run, and
what they find is raised once. Only headers of files are read; no process group exists.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megatron.config.run import RunConfig
from megatron.data.kinds.program_data import GPT_DATA, ProgramData
from megatron.errors import Finding, MegatronError, PreflightError
from megatron.launch import Launch
from megatron.preflight.corpora import CorporaOnce
from megatron.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The flags and the ranks of a run, before anything is built.

    `tokenizer` is None when it could not be built; `tokenizer_error` is then the error. `reads` is
    what the program makes of the flags about data. `corpora` is what checks have opened so far, so
    that no corpus is opened twice.
    """

    config: RunConfig
    launch: Launch
    tokenizer: Tokenizer | None = None
    tokenizer_error: MegatronError | None = None
    reads: ProgramData = GPT_DATA
    corpora: CorporaOnce = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "corpora", CorporaOnce(self.reads.kind, self.reads.open))

    @property
    def model_ranks(self) -> int:
        """Number of ranks that hold the model's weights once."""
        parallel = self.config.parallel
        return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size

    @property
    def replica_ranks(self) -> int:
        """Number of ranks that take the same samples."""
        return self.model_ranks * self.config.parallel.context_parallel_size

    @property
    def data_parallel_size(self) -> int | None:
        """Model replicas that take other samples; None when the ranks do not divide into them."""
        replicas, left = divmod(self.launch.world_size, self.replica_ranks)
        return replicas if replicas and not left else None


Check = Callable[[RunPlan], Iterable[MegatronError]]


def run_preflight(plan: RunPlan, checks: Iterable[Check]) -> None:
    """Run every check and raise one `PreflightError` with all findings."""
    findings = collect_findings(plan, checks)
    if findings:
        raise PreflightError(findings)


def collect_findings(plan: RunPlan, checks: Iterable[Check]) -> list[Finding]:
    """Run every check; an error that a check raises is a finding like one that it yields."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += [Finding(check.__name__, error) for error in check(plan)]
        except MegatronError as error:
            findings.append(Finding(check.__name__, error))
    return findings
