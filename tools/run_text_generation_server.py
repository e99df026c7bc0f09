"""Serve a trained GPT over HTTP: `python -m tools.run_text_generation_server --load FOLDER`.

OpenAI's interface, Megatron's `PUT /api` and a page, at http://127.0.0.1:5000 unless flags say
otherwise. Model and tokenizer are the checkpoint's own. SIGTERM lets running requests finish. Under
torchrun the ranks share the model; rank 0 serves, and the others follow it.
"""

import argparse
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import log
from megatron.control.client import ControlConnectionError, ControlTimeoutError, new_id
from megatron.data.samples.chat_template import TEMPLATES, ChatTemplate, template_of
from megatron.errors import ConfigError, first_line
from megatron.global_vars import get_runtime
from megatron.host import lasting_objects
from megatron.initialize import end_peer_watch, tell_of_peers
from megatron.launch import launch_from_environment
from megatron.program import run_program
from megatron.scheduling.control.messages import Command
from megatron.scheduling.control.states import CommandKind, Mode
from megatron.serving.limits import ServerLimits
from megatron.serving.packages import check_packages
from tools.flags.device_map import add_placement_flags, placement_options
from tools.flags.model import ModelChoice, add_model_flags, read_model_flags

if TYPE_CHECKING:
    from megatron.control.rank_thread import ControlThread
    from megatron.serving.engine.engine_thread import EngineThread
    from megatron.serving.engine.model_engine import Speculation
    from megatron.serving.ranks.follower import Follower
    from megatron.serving.ranks.rank_model import LoadWeights
    from megatron.trained_model import LoadedModel


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, take the port, load the model, and serve until a signal."""
    args, choice = read_model_flags(parser(), argv)
    check_packages()
    limits = ServerLimits(**{each.name: getattr(args, each.name) for each in fields(ServerLimits)})
    template = None if args.chat_template is None else template_of(args.chat_template)
    _serve(args, choice, limits, template)


def parser() -> argparse.ArgumentParser:
    """Return the flags of this program."""
    made = argparse.ArgumentParser(
        prog="run_text_generation_server",
        description="Serve a trained GPT over HTTP.",
        allow_abbrev=False,
    )
    add_model_flags(made)
    add_placement_flags(made)
    add = made.add_argument
    add("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    add("--port", type=int, default=5000, help="port to listen on; 0: any free one [5000]")
    add("--api-key-file", type=Path, metavar="FILE", help=_KEY_HELP)
    add("--control-key-file", type=Path, metavar="FILE", help=_CONTROL_HELP)
    add("--model-name", help="name that clients use [the folder's]")
    add("--chat-template", metavar="NAME", help=_TEMPLATE_HELP)
    add("--strict-api", action="store_true", help="refuse fields of a body that nothing reads")
    add("--max-model-len", type=int, metavar="N", help=_LENGTH_HELP)
    add("--max-sequences", type=int, default=32, help="sequences that run at once [32]")
    add("--max-step-tokens", type=int, default=512, help="tokens that a step computes [512]")
    add("--cache-blocks", type=int, metavar="N", help=_BLOCKS_HELP)
    add("--speculative", metavar="ngram|FOLDER", help=_SPECULATIVE_HELP)
    add("--speculative-tokens", type=int, metavar="N", help=_SPECULATIVE_TOKENS_HELP)
    add("--embedding-pooling", choices=("mean", "last"), default="mean", help=_POOLING_HELP)
    group = made.add_argument_group("limits", "What one client may ask for (docs/serving.md).")
    for each in fields(ServerLimits):
        flag = f"--{each.name.replace('_', '-')}"
        text = f"{each.metadata['help']} [{each.default}]"
        group.add_argument(flag, type=int, default=each.default, metavar="N", help=text)
    return made


SPECULATIVE_TOKENS = 4
_SPECULATIVE_HELP = (
    "propose tokens that are checked in one step: ngram looks them up in prompt and answer, FOLDER "
    "is the checkpoint of a smaller model [none]"
)
_SPECULATIVE_TOKENS_HELP = f"proposed tokens of a sequence in a step [{SPECULATIVE_TOKENS}]"
_STOP_S = 10.0  # for all replicas to end
_KEY_HELP = "file of API keys, one a line; one more may be in MEGATRON_API_KEY"
_CONTROL_HELP = "file of keys of operators, who pause and stop the engine (docs/serving.md)"
_TEMPLATE_HELP = (
    f"how chats are written: {', '.join(TEMPLATES)}, or a folder of Hugging Face [the tokenizer's]"
)
_LENGTH_HELP = "most tokens of prompt and answer [the positions of the model]"
_POOLING_HELP = "hidden states of /v1/embeddings: their mean, or that of the last token [mean]"
_BLOCKS_HELP = "blocks of the cache of keys and values [as many as needed, or as fit into memory]"


def tokenizer_template(folder: str | None) -> ChatTemplate | None:
    """Return the chat template in a tokenizer's folder; None if there is none."""
    if folder is None or not Path(folder).is_dir():
        return None
    settings = Path(folder) / "tokenizer_config.json"
    has_one = (Path(folder) / "chat_template.jinja").is_file()
    if not has_one and settings.is_file():
        has_one = "chat_template" in json.loads(settings.read_bytes())
    return template_of(folder) if has_one else None


def _serve(
    args: argparse.Namespace,
    choice: ModelChoice,
    limits: ServerLimits,
    template: ChatTemplate | None,
) -> None:
    # Only now is it known that the packages of the server are there.
    from megatron.inference.offload.working_bytes import CacheDemand
    from megatron.inference.pooling import Pooling
    from megatron.serving.admission import Admission
    from megatron.serving.engine.model_engine import EngineSize, model_engine, ranks_of_replica
    from megatron.serving.generation import ServerBackend
    from megatron.serving.metrics import ServerMetrics
    from megatron.serving.ranks.control import start_control, wait_until_running
    from megatron.serving.ranks.follower import Follower
    from megatron.serving.ranks.operator_api import operator_app
    from megatron.serving.ranks.round_log import check_idle_wait
    from megatron.serving.ranks.routed_engine import RoutedEngine
    from megatron.serving.served_model import ServedModel
    from megatron.serving.server import (
        TextServer,
        api_keys,
        check_exposure,
        control_keys,
        is_loopback,
        listen,
        serve,
    )
    from megatron.tokenizer.token_text import text_rules
    from megatron.trained_model import load_model_for_inference

    if args.speculative is None and args.speculative_tokens is not None:
        raise ConfigError(
            "nothing proposes tokens",
            found=f"--speculative-tokens {args.speculative_tokens} without --speculative",
            fix="add --speculative ngram",
        )
    launch = launch_from_environment()
    tp, pp, ep = (
        choice.given.get(f"{axis}_model_parallel_size", 1)
        for axis in ("tensor", "pipeline", "expert")
    )
    etp = choice.given.get("expert_tensor_parallel_size")
    replica = ranks_of_replica(launch, tp=tp, pp=pp, ep=ep, etp=etp)
    keys, of_operators = api_keys(args.api_key_file), control_keys(args.control_key_file)
    check_exposure(args.host, keys)
    listener = listen(args.host, args.port) if launch.rank == 0 else None
    demand = CacheDemand(
        sequences=args.max_sequences,
        length=args.max_model_len,
        step_tokens=args.max_step_tokens,
        blocks=args.cache_blocks,
    )
    loaded = load_model_for_inference(
        choice.folder,
        choice.iteration,
        given=choice.given,
        weight_quantization=choice.weight_quantization,
        placement=placement_options(args, demand),
        shares_experts=True,
    )
    check_idle_wait(loaded.config.launch.distributed_timeout_minutes)
    get_runtime().activity.step(1)  # ranks that are silent from here on end the job
    if template is None:
        template = tokenizer_template(loaded.config.tokenizer.tokenizer_name_or_path)
    size = EngineSize(
        length=args.max_model_len,
        sequences=args.max_sequences,
        step_tokens=args.max_step_tokens,
        blocks=args.cache_blocks if loaded.placed is None else loaded.placed.blocks,
    )
    rules = text_rules(loaded.tokenizer)
    engine = model_engine(
        loaded.model,
        loaded.ctx,
        size,
        max_queued=limits.max_requests,
        load=_other_weights_of(loaded, choice),
        rules=rules,
        speculation=_speculation(args, loaded, choice),
        pooling=Pooling(args.embedding_pooling),
    )
    has_replicas = launch.world_size > replica
    if has_replicas:
        end_peer_watch()
    control = start_control(engine, loaded.ctx)
    if isinstance(engine, Follower) or listener is None:
        _follow(engine, control)
        return
    # Its thread may wait for a rank that waits for the one that failed.
    tell_of_peers(lambda error: engine.lose(first_line(error)))
    client = RoutedEngine(engine, control) if has_replicas else engine
    wait_until_running(client)
    served = ServedModel(
        name=args.model_name or Path(choice.folder).resolve().name,
        created=int(time.time()),
        tokenizer=loaded.tokenizer,
        rules=rules,
        vocab_size=loaded.model.build.vocab.true,
        context_length=engine.max_length,
        template=template,
    )
    backend = ServerBackend(
        served,
        client,
        limits,
        Admission(limits.max_requests),
        ServerMetrics(served.name, client.status),
    )
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    chats = "no chats (--chat-template)" if template is None else f"chats by {template.name}"
    text = (
        f"serving {served.name} at {address}: {served.context_length} tokens, "
        f"{engine.status().blocks} blocks, {chats}, {len(keys)} API keys"
    )
    try:
        server = TextServer(
            backend,
            host=args.host,
            keys=keys,
            is_strict=args.strict_api,
            ends_with_engine=launch.world_size > 1,
            operators=operator_app(
                control,
                lambda: engine.settled_epoch,
                keys=of_operators,
                is_local=is_loopback(args.host),
                has_api_keys=bool(keys),
                max_header_bytes=limits.max_header_bytes,
            ),
            on_start=lambda: log.info(text),
        )
        with lasting_objects():
            serve(server, listener)
    finally:
        if has_replicas:
            _stop_replicas(control)
        if not engine.stop():
            log.warning("a step of the engine has not ended; the program does not wait for it")
        control.close()


def _other_weights_of(loaded: "LoadedModel", choice: ModelChoice) -> "LoadWeights | None":
    """Return what loads other weights; None where those in use cannot be exchanged."""
    from megatron.trained_model import other_weights

    is_plain = choice.weight_quantization is None and loaded.placed is None
    if not is_plain or loaded.model.prompt_is_prefix:
        return None
    return lambda folder: other_weights(folder, choice.given)


def _stop_replicas(control: "ControlThread") -> None:
    """End the engines of all replicas; those that do not answer end when they miss rank 0."""
    stop = Command(new_id(), CommandKind.STOP, Mode.NOW)
    try:
        control.send(stop, wait_s=_STOP_S).result()
    except (ControlTimeoutError, ControlConnectionError) as error:
        log.warning(f"not all replicas have stopped: {error.problem}")


def _follow(engine: "Follower | EngineThread", control: "ControlThread") -> None:
    """Compute until rank 0 stops, whatever signals a launcher sends meanwhile."""
    from megatron.serving.ranks.control import run_replica
    from megatron.serving.ranks.follower import Follower

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    with lasting_objects():
        if isinstance(engine, Follower):
            log.debug(f"the first rank of this replica has stopped: {engine.run()}")
        else:
            run_replica(engine, control)


def _speculation(
    args: argparse.Namespace, loaded: "LoadedModel", choice: ModelChoice
) -> "Speculation | None":
    from megatron.serving.engine.model_engine import Speculation
    from megatron.serving.ranks.round_log import GroupLog, engine_group
    from megatron.trained_model import load_draft_model

    if args.speculative is None:
        return None
    tokens = SPECULATIVE_TOKENS if args.speculative_tokens is None else args.speculative_tokens
    found = Speculation(tokens)
    if args.speculative == "ngram" or not GroupLog(engine_group(loaded.ctx)).leads:
        return found  # the other ranks get what the first one proposes
    return replace(
        found, draft_model=load_draft_model(args.speculative, loaded, given=choice.given)
    )


if __name__ == "__main__":
    run_program(main)
