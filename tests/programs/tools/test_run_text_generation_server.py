"""The server's program: a trained model behind HTTP, and errors before anything is loaded."""

import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import CheckpointError, ConfigError
from megatron.serving import packages
from megatron.serving.server import listen
from tests.support.deadlines import HANG_S
from tests.support.launch import (
    PRETRAIN,
    ROOT,
    Started,
    all_ended,
    byte_corpus,
    each_rank,
    run_program,
    small_run,
)
from tools.run_text_generation_server import main, parser, tokenizer_template

# A lease of 5 s and a look of 1 s; a machine of two cores that has other work is slower.
NOTICED_S = 15.0
ENDED_S = 30.0
SERVER = str(ROOT / "tools" / "run_text_generation_server.py")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(
        tmp_path_factory.mktemp("experts"), "--num-experts", "4", "--moe-router-topk", "2"
    )


def trained(folder: Path, *words: str) -> Path:
    flags = ["--train-iters", "4", "--save", "save", "--eval-iters", "0", "--log-interval", "100"]
    flags += ["--seq-length", "96", *words]
    done = run_program(
        [sys.executable, PRETRAIN, *small_run(byte_corpus(folder), *flags)], cwd=folder
    )
    assert done.status == 0, done.text
    return folder / "save"


def post(url: str, body: dict[str, Any], method: str = "POST") -> Any:
    request = urllib.request.Request(  # noqa: S310 - of the loopback interface
        url, json.dumps(body).encode(), {"content-type": "application/json"}, method=method
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        return json.loads(answer.read())


@pytest.mark.slow
def test_a_trained_model_is_served_until_a_signal(checkpoint: Path, tmp_path: Path) -> None:
    words = [sys.executable, SERVER, "--load", str(checkpoint), "--port", "0"]
    words += ["--model-name", "tiny", "--chat-template", "chatml"]
    words += ["--speculative", str(checkpoint), "--speculative-tokens", "2"]
    with Started(words, cwd=tmp_path) as program:
        program.wait_for("serving tiny at ")
        found = re.search(r"http://[\d.]+:\d+", program.text)
        assert found is not None
        url = found[0]
        greedy = {"prompt": "the ", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        scored = {"echo": True, "logprobs": 1}
        (choice,) = post(f"{url}/v1/completions", greedy | scored)["choices"]
        again = post(f"{url}/v1/completions", greedy | {"prompt": ["the ", "dogs"]})["choices"]
        assert choice["text"] == "the " + again[0]["text"]
        scores = choice["logprobs"]
        assert len(scores["tokens"]) == len("the ") + 6
        for chosen, top in list(zip(scores["token_logprobs"], scores["top_logprobs"]))[4:]:
            assert chosen == max(top.values())  # greedy choice
        body = {"prompts": ["the "], "tokens_to_generate": 6, "top_k": 1}
        assert len(post(f"{url}/api", body, "PUT")["tokens"][0]) <= 10
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        answer = post(f"{url}/v1/chat/completions", chat)
        assert answer["usage"]["completion_tokens"] <= 3
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:  # noqa: S310
            numbers = answer.read().decode()
        proposed, accepted = (
            re.search(rf"spec_decode_num_{name}_tokens_total{{\S+ (\S+)", numbers)
            for name in ("draft", "accepted")
        )
        assert proposed is not None
        assert accepted is not None
        assert float(proposed[1]) > 0
        assert proposed[1] == accepted[1]  # the model itself proposes them
        program.process.send_signal(signal.SIGTERM)
        ended = program.ended()
    assert ended.status == 0, ended.text
    assert "stopping: 0 requests have 30 s to end" in ended.text


@contextmanager
def served_by(
    count: int, checkpoint: Path, folder: Path, *, axes: Sequence[str], words: Sequence[str] = ()
) -> Iterator[tuple[str, list[Started]]]:
    """A server of ranks that share a model; the end of one does not end the others."""
    flags = ["--load", str(checkpoint), "--port", "0", *words]
    for axis in axes:
        flags += [f"--{axis}-model-parallel-size", "2"]
    with each_rank(count, flags, cwds=[folder], program=SERVER) as ranks:
        ranks[0].wait_for("serving save at ")
        found = re.search(r"http://[\d.]+:\d+", ranks[0].text)
        assert found is not None
        yield found[0], ranks


def answered(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The status and the body of an answer, also of one that is an error."""
    try:
        return 200, post(url, body)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


GREEDY = {"prompt": "the ", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_two_ranks_serve_the_text_of_one_and_change_their_state_together(
    axis: str, checkpoint: Path, tmp_path: Path
) -> None:
    words = [sys.executable, SERVER, "--load", str(checkpoint), "--port", "0"]
    with Started(words, cwd=tmp_path) as program:
        program.wait_for("serving save at ")
        found = re.search(r"http://[\d.]+:\d+", program.text)
        assert found is not None
        alone = post(f"{found[0]}/v1/completions", GREEDY)["choices"][0]["text"]
    draft = ["--speculative", str(checkpoint)] if axis == "tensor" else []  # the model itself
    with served_by(2, checkpoint, tmp_path, axes=[axis], words=draft) as (url, ranks):
        assert post(f"{url}/v1/completions", GREEDY)["choices"][0]["text"] == alone
        with urllib.request.urlopen(f"{url}/state", timeout=30) as state:  # noqa: S310
            accepted = json.loads(state.read())["engine"]["accepted_tokens"]
        assert (accepted > 0) is bool(draft)
        paused = post(f"{url}/control/pause", {})
        assert [(one["rank"], one["verdict"]) for one in paused["ranks"]] == [
            (0, "ack"),
            (1, "ack"),
        ]
        status, refused = answered(f"{url}/control/weights", {"load": str(tmp_path / "none")})
        assert (status, refused["code"]) == (409, "refused")
        assert "does not exist" in refused["detail"]
        assert answered(f"{url}/v1/completions", GREEDY)[0] == 503
        for path, body in (
            ("suspend", {"cache": "drop"}),
            ("weights", {"load": str(checkpoint)}),
            ("resume", {}),
        ):
            assert post(f"{url}/control/{path}", body)["code"] == "ok"
        assert post(f"{url}/v1/completions", GREEDY)["choices"][0]["text"] == alone
        assert post(f"{url}/control/stop", {})["state"] == "stopped"
        assert [one.status for one in all_ended(ranks)] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "axes", "model"),
    [
        (signal.SIGKILL, ["pipeline"], "checkpoint"),
        (signal.SIGSTOP, ["tensor"], "checkpoint"),
        pytest.param(signal.SIGSTOP, ["pipeline"], "checkpoint", marks=pytest.mark.wide),
        pytest.param(signal.SIGKILL, ["pipeline", "expert"], "experts", marks=pytest.mark.wide),
    ],
    ids=["killed", "stopped", "stage stopped", "killed beside its experts and stages"],
)
def test_a_rank_that_is_gone_fails_requests_with_a_reason_and_ends_the_job(
    sent: signal.Signals,
    axes: list[str],
    model: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    folder: Path = request.getfixturevalue(model)
    served = served_by(2 ** len(axes), folder, tmp_path, axes=axes)
    with served as (url, ranks), ThreadPoolExecutor() as pool:
        body = GREEDY | {"max_tokens": 90, "n": 8}
        post(f"{url}/v1/completions", GREEDY)
        os.kill(ranks[-1].process.pid, sent)
        began = time.monotonic()
        status, answer = pool.submit(answered, f"{url}/v1/completions", body).result(HANG_S)
        assert time.monotonic() - began < NOTICED_S
        assert (status, answer["error"]["code"]) == (503, "engine_unavailable"), answer
        # The rank that answers finds out by itself, or is told of it.
        reasons = ["can no longer compute together"] if sent is signal.SIGKILL else []
        reasons.append(f"rank {len(ranks) - 1}")
        assert any(reason in answer["error"]["message"] for reason in reasons), answer
        ended = all_ended(ranks)
        assert time.monotonic() - began < ENDED_S
        assert all(one.status != 0 for one in ended)
        assert "the engine no longer works: " in ended[0].text


@pytest.mark.slow
def test_a_server_of_two_replicas_outlives_one_of_them(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--load", str(checkpoint), "--port", "0"]
    with each_rank(2, flags, cwds=[tmp_path], program=SERVER) as ranks:
        ranks[0].wait_for("serving save at ")
        found = re.search(r"http://[\d.]+:\d+", ranks[0].text)
        assert found is not None
        url = found[0]
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(post, f"{url}/v1/completions", GREEDY) for _ in range(4)]
            texts = {each.result(HANG_S)["choices"][0]["text"] for each in asked}
        assert len(texts) == 1
        assert state_of(url)["live_replicas"] == [0, 1]
        os.kill(ranks[1].process.pid, signal.SIGKILL)
        deadline = time.monotonic() + NOTICED_S
        while state_of(url)["lost_replicas"] != [1]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert post(f"{url}/v1/completions", GREEDY)["choices"][0]["text"] in texts
        ranks[0].process.send_signal(signal.SIGTERM)
        first, second = all_ended(ranks)
    assert (first.status, second.status) == (0, -signal.SIGKILL), first.text


def state_of(url: str) -> Any:
    """The engine as /health tells it."""
    with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:  # noqa: S310
        return json.loads(answer.read())["engine"]


def test_a_missing_checkpoint_and_a_port_in_use_end_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_API_KEY", raising=False)
    with pytest.raises(CheckpointError, match="does not exist"):
        main(["--load", str(tmp_path / "nowhere"), "--port", "0"])
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="the port is in use"):
        main(["--load", str(tmp_path), "--port", str(taken.getsockname()[1])])
    with pytest.raises(ConfigError, match="nothing proposes tokens"):
        main(["--load", str(tmp_path), "--port", "0", "--speculative-tokens", "2"])
    with pytest.raises(ConfigError, match="other machines could use the server"):
        main(["--load", str(tmp_path), "--host", "0.0.0.0", "--port", "0"])  # noqa: S104


def test_missing_packages_are_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packages.TESTED, "no-such-package", ((1,), (2,)))
    with pytest.raises(ConfigError, match="packages are needed that are not") as caught:
        main(["--load", str(tmp_path)])
    assert (caught.value.found, caught.value.fix) == ("no no-such-package", packages.INSTALL)


def test_the_limits_are_flags_with_their_defaults() -> None:
    help_text = parser().format_help()
    assert "--max-body-kib N" in help_text
    args = parser().parse_args(["--load", "x", "--max-body-kib", "7"])
    assert (args.max_body_kib, args.request_timeout, args.host) == (7, 600, "127.0.0.1")


def test_the_template_of_a_tokenizers_folder_is_used_if_there_is_one(tmp_path: Path) -> None:
    assert tokenizer_template(None) is None
    assert tokenizer_template(str(tmp_path)) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text("{}")
    assert tokenizer_template(str(tmp_path)) is None
    settings.write_text('{"chat_template": "{{ messages[0].content }}"}')
    found = tokenizer_template(str(tmp_path))
    assert found is not None
    assert found.source == "{{ messages[0].content }}"
