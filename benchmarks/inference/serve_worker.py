"""What `serve.py` measures, each in a process of its own: our server, and peers of transformers.

`ours` serves HTTP and prints its port. The peers are called without HTTP: they read loads as lines
of JSON, take each request at its arrival, and answer with the times of their tokens.
"""

import argparse
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.inference.decode import DTYPES, SHAPE, our_model
from benchmarks.peers.plain_gpt import LlamaShape
from megatron.mpu.context import ParallelContext

MOST_AT_ONCE = 32  # sequences that any contestant computes together
MOST_QUEUED = 64  # prompts that our server lets in
_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class LoadedRequest:
    """A request of a load: its arrival in seconds after the start, prompt, and new tokens."""

    arrival: float
    prompt: tuple[int, ...]
    new: int


@dataclass(slots=True)
class TokenTimes:
    """The tokens of one request and when they came, in seconds after the start."""

    tokens: list[int]
    times: list[float]


def main(argv: Sequence[str] | None = None) -> None:
    """Be one contestant until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("contestant", choices=("ours", *PEERS))
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    flags = parser.parse_args(argv)
    shape = LlamaShape(**{**asdict(SHAPE), "layers": flags.layers})
    if flags.contestant == "ours":
        serve_ours(shape, flags.dtype)
    else:
        peer = PEERS[flags.contestant](shape, flags.dtype)
        print("ready", flush=True)
        for line in sys.stdin:
            load = [LoadedRequest(at, tuple(prompt), new) for at, prompt, new in json.loads(line)]
            print(json.dumps([asdict(each) for each in peer(load)]), flush=True)


def serve_ours(shape: LlamaShape, dtype: str) -> None:
    """Serve our model on a free port, which is printed, until standard input ends."""
    from megatron.serving.admission import Admission
    from megatron.serving.engine.engine_thread import EngineThread
    from megatron.serving.engine.model_engine import EngineSize, model_engine
    from megatron.serving.generation import ServerBackend
    from megatron.serving.limits import ServerLimits
    from megatron.serving.metrics import ServerMetrics
    from megatron.serving.served_model import ServedModel
    from megatron.serving.server import TextServer, listen
    from megatron.tokenizer.token_text import text_rules
    from megatron.tokenizer.tokenizer import build_tokenizer

    limits = ServerLimits(max_requests=MOST_QUEUED)
    size = EngineSize(sequences=MOST_AT_ONCE, step_tokens=_STEP_TOKENS)
    model = our_model(shape, dtype)
    made = model_engine(model, ParallelContext.single(), size, max_queued=MOST_QUEUED)
    engine = cast(EngineThread, made)  # that of the only rank follows none
    tokenizer = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=shape.vocab)
    served = ServedModel(
        name="random",
        created=0,
        tokenizer=tokenizer,
        rules=text_rules(tokenizer),
        vocab_size=shape.vocab,
        context_length=engine.max_length,
    )
    metrics = ServerMetrics(served.name, engine.status)
    backend = ServerBackend(served, engine, limits, Admission(MOST_QUEUED), metrics)
    listener = listen("127.0.0.1", 0)
    server = TextServer(backend, host="127.0.0.1", on_start=lambda: print(port, flush=True))
    port = listener.getsockname()[1]

    def until_input_ends() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=until_input_ends, daemon=True).start()
    engine.start()
    try:
        server.run(sockets=[listener])
    finally:
        engine.stop()


Peer = Callable[[list[LoadedRequest]], list[TokenTimes]]
"""Takes each request of a load at its arrival, and returns their tokens with times."""


def continuous_peer(shape: LlamaShape, dtype: str) -> Peer:
    """Return transformers' continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    peer = _their_model(shape, dtype)
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=shape.seq_length, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    batching = ContinuousBatchingConfig(
        num_blocks=MOST_AT_ONCE,  # of 256 tokens
        max_batch_tokens=_STEP_TOKENS,
        max_requests_per_batch=MOST_AT_ONCE,
    )

    def run(load: list[LoadedRequest]) -> list[TokenTimes]:
        manager = peer.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        manager.start()
        start = time.monotonic()
        found = [TokenTimes([], []) for _ in load]

        def submit() -> None:
            for number, each in enumerate(load):
                time.sleep(max(0.0, start + each.arrival - time.monotonic()))
                manager.add_request(
                    list(each.prompt),
                    request_id=str(number),
                    max_new_tokens=each.new,
                    streaming=True,
                )

        threading.Thread(target=submit, daemon=True).start()
        while any(len(times.tokens) < each.new for times, each in zip(found, load)):
            result = manager.get_result(timeout=1)
            if result is not None:
                times = found[int(result.request_id)]
                added = result.generated_tokens[len(times.tokens) :]
                times.tokens += added
                times.times += [time.monotonic() - start] * len(added)
        manager.stop(block=True, timeout=10)
        return found

    return run


def static_peer(shape: LlamaShape, dtype: str) -> Peer:
    """Return transformers' `generate` of all requests that wait, padded, again and again."""
    peer = _their_model(shape, dtype)

    def run(load: list[LoadedRequest]) -> list[TokenTimes]:
        start = time.monotonic()
        found = [TokenTimes([], []) for _ in load]
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()

        def arrive() -> None:
            for number, each in enumerate(load):
                time.sleep(max(0.0, start + each.arrival - time.monotonic()))
                waiting.put(number)

        threading.Thread(target=arrive, daemon=True).start()
        left = len(load)
        while left:
            batch = list(_taken(waiting))
            left -= len(batch)
            _generate(peer, [load[at] for at in batch], [found[at] for at in batch], start)
        return found

    return run


def _taken(waiting: "queue.SimpleQueue[int]") -> Iterator[int]:
    """Wait for one request, and yield it with those behind it."""
    yield waiting.get()
    for _ in range(MOST_AT_ONCE - 1):
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return


@torch.no_grad()
def _generate(peer: Any, batch: list[LoadedRequest], found: list[TokenTimes], start: float) -> None:
    from transformers.generation.streamers import BaseStreamer

    class Times(BaseStreamer):  # type: ignore[misc]
        """Notes the tokens of a batch as they come; the prompts come first."""

        is_prompt = True

        def put(self, value: torch.Tensor) -> None:
            if not self.is_prompt:
                now = time.monotonic() - start
                for token, each, times in zip(value.tolist(), batch, found):
                    if len(times.tokens) < each.new:
                        times.tokens.append(token)
                        times.times.append(now)
            self.is_prompt = False

        def end(self) -> None:
            pass

    longest, new = max(len(each.prompt) for each in batch), max(each.new for each in batch)
    rows = [[0] * (longest - len(each.prompt)) + list(each.prompt) for each in batch]
    mask = [[0] * (longest - len(each.prompt)) + [1] * len(each.prompt) for each in batch]
    peer.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(mask),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        use_cache=True,
        streamer=Times(),
    )


def _their_model(shape: LlamaShape, dtype: str) -> Any:
    from benchmarks.peers import packages

    ours = our_model(shape, dtype)
    peer: Any = packages.transformers(ours.named_parameters(), shape).model
    peer = peer.to(DTYPES[dtype]).eval()
    peer.generation_config.pad_token_id = 0
    return peer


PEERS: dict[str, Callable[[LlamaShape, str], Peer]] = {
    "continuous batching of transformers": continuous_peer,
    "static batches of transformers": static_peer,
}


if __name__ == "__main__":
    main()
