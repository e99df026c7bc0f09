"""How much one client may ask for, and how long it may take."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from megatron.errors import ConfigError

_KIB = 1024


def _limit(default: int, meaning: str, *, least: int = 1) -> int:
    limit: int = field(default=default, metadata={"help": meaning, "least": least})
    return limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of the server. Every field is a flag of its program, with the help that stands here.

    Raises:
        ConfigError: a value below the least that makes sense.
    """

    max_connections: int = _limit(512, "open connections; further ones are closed with 503")
    max_requests: int = _limit(128, "prompts that run or wait at once; further ones get 429")
    max_body_kib: int = _limit(1024, "KiB of a request's body (413)")
    max_header_kib: int = _limit(16, "KiB of a request's headers (431)")
    max_json_depth: int = _limit(32, "how deep objects and lists of a body lie in each other")
    max_prompts: int = _limit(128, "prompts of one request")
    max_samples: int = _limit(8, "n, the answers to one prompt")
    max_stop_strings: int = _limit(16, "stop strings of one request", least=0)
    max_logprobs: int = _limit(20, "likeliest tokens that are reported with each one", least=0)
    max_schema_kib: int = _limit(64, "KiB of a JSON schema, regular expression or grammar")
    max_messages: int = _limit(1024, "messages of one chat")
    header_timeout: int = _limit(10, "seconds for the headers of a request (the connection closes)")
    body_timeout: int = _limit(30, "seconds for the body of a request (408)")
    idle_timeout: int = _limit(30, "seconds that a connection stays open without a request")
    client_timeout: int = _limit(60, "seconds that a client may read nothing of a stream")
    request_timeout: int = _limit(600, "seconds of a request, with its time in the queue (504)")
    keep_alive_interval: int = _limit(15, "seconds without a token before a stream gets a comment")
    drain_timeout: int = _limit(30, "seconds for running requests after SIGTERM", least=0)

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise problem

    def _problems(self) -> Iterator[ConfigError]:
        for each in fields(self):
            value, least = getattr(self, each.name), each.metadata["least"]
            if not value >= least:
                yield ConfigError(
                    "a limit of the server is too small",
                    found=f"--{each.name.replace('_', '-')} {value}",
                    fix=f"use {least} or more",
                )

    @property
    def max_body_bytes(self) -> int:
        """Bytes of a body."""
        return self.max_body_kib * _KIB

    @property
    def max_schema_bytes(self) -> int:
        """Bytes of a JSON schema or a regular expression."""
        return self.max_schema_kib * _KIB

    @property
    def max_header_bytes(self) -> int:
        """Bytes of a request's headers."""
        return self.max_header_kib * _KIB
