"""Numbers of the server and its engine, as Prometheus reads them.

Names are those of vLLM's metrics with the prefix `megatron_`, so that boards need one
word changed.
Numbers of the engine are read when they are asked for.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from megatron.serving.api_errors import ApiError
from megatron.serving.conversion import TextJob
from megatron.serving.engine_client import EngineStatus

PREFIX = "megatron_"
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_WINDOW_S = 5.0  # over which tokens per second are counted


class JobTimes:
    """When the tokens of a job came, in seconds of the monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.start = clock()
        self.first: float | None = None
        self.gaps: list[float] = []
        self._last = self.start

    def add_token(self) -> None:
        """Note that a token has come."""
        now = self._clock()
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self._last)
        self._last = now

    @property
    def whole(self) -> float:
        """Seconds since the job came."""
        return self._clock() - self.start


class TokenRate:
    """Tokens per second over the last seconds, of a total that only grows."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._totals: deque[tuple[float, int]] = deque()

    def rate(self, total: int) -> float:
        """Return the tokens per second since the oldest total of the last seconds."""
        now = self._clock()
        self._totals.append((now, total))
        while len(self._totals) > 1 and now - self._totals[1][0] >= _WINDOW_S:
            self._totals.popleft()
        before, tokens = self._totals[0]
        return (total - tokens) / (now - before) if now > before else 0.0


class ServerMetrics:
    """Counts what the server does."""

    def __init__(self, model: str, status: Callable[[], EngineStatus]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._model = model
        self.registry.register(_EngineNumbers(model, status))
        self._first = self._histogram("time_to_first_token_seconds", _SECONDS)
        self._gap = self._histogram("inter_token_latency_seconds", _SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", _SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", _TOKENS)
        self._success = self._counter("request_success", "finished_reason")
        self._rejected = self._counter("admission_rejections", "reason")

    def accepted(self, job: TextJob) -> None:
        """Count a job that the engine has accepted."""
        for prompt in job.prompts:
            self._prompt.labels(self._model).observe(len(prompt.tokens))

    def completed(
        self, job: TextJob, tokens: int, finishes: Sequence[str], times: JobTimes
    ) -> None:
        """Count a job that has all its answers."""
        for finish in finishes:
            self._success.labels(self._model, finish).inc()
        self._generated.labels(self._model).observe(tokens)
        self._whole.labels(self._model).observe(times.whole)
        if times.first is not None:
            self._first.labels(self._model).observe(times.first - times.start)
        for gap in times.gaps:
            self._gap.labels(self._model).observe(gap)

    def failed(self, error: ApiError) -> None:
        """Count a job that was not accepted or did not complete."""
        self._rejected.labels(self._model, str(error.code)).inc()

    def text(self) -> bytes:
        """Return all numbers in the format of Prometheus."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            PREFIX + name,
            name.replace("_", " "),
            ["model_name"],
            registry=self.registry,
            buckets=buckets,
        )

    def _counter(self, name: str, label: str) -> Counter:
        return Counter(
            PREFIX + name, name.replace("_", " "), ["model_name", label], registry=self.registry
        )


class _EngineNumbers(Collector):
    """The state of an engine, read when it is asked for."""

    def __init__(self, model: str, status: Callable[[], EngineStatus]) -> None:
        self._model, self._status = model, status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        gauges = {
            "num_requests_running": status.running,
            "num_requests_waiting": status.waiting,
            "kv_cache_usage_perc": status.used_blocks / status.blocks if status.blocks else 0.0,
        }
        counters = {
            "prompt_tokens": status.prompt_tokens,
            "generation_tokens": status.generated_tokens,
            "num_preemptions": status.preemptions,
            "prefix_cache_queries": status.prefix_queries,
            "prefix_cache_hits": status.prefix_hits,
            "spec_decode_num_drafts": status.drafts,
            "spec_decode_num_draft_tokens": status.draft_tokens,
            "spec_decode_num_accepted_tokens": status.accepted_tokens,
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, name.replace("_", " "), labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, value in counters.items():
            count = CounterMetricFamily(
                PREFIX + name, name.replace("_", " "), labels=["model_name"]
            )
            count.add_metric([self._model], value)
            yield count
        state = GaugeMetricFamily(
            f"{PREFIX}engine_state", "1 for the state that the engine is in", labels=["state"]
        )
        state.add_metric([status.state if status.is_alive else "failed"], 1)
        yield state
