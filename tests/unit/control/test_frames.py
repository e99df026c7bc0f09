"""Tests of megatron.control.frames, and of every wait of megatron.control."""

import ast
import asyncio
from collections.abc import Iterator

import pytest

from megatron.control import frames
from megatron.control.frames import frame_of, read_frame
from megatron.scheduling.control.messages import MAX_MESSAGE_BYTES, MessageError
from tests.architecture.source_tree import MEGATRON, Source, sources

# Waits that end by themselves: a sleep, a listening socket, and functions of the package.
ENDING = {
    *("sleep", "start_server", "read_frame", "close_writer", "_connect_and_read", "send"),
    "_knows_secret",
}


def read(data: bytes, *, ends: bool = True, wait_s: float = 5.0) -> list[bytes | None]:
    """Return the messages of a stream with these bytes, until it ends."""

    async def all_frames() -> list[bytes | None]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        if ends:
            reader.feed_eof()
        found = [await read_frame(reader, wait_s)]
        while found[-1] is not None:
            found.append(await read_frame(reader, wait_s))
        return found

    return asyncio.run(all_frames())


def test_messages_come_out_as_they_went_in_until_the_stream_ends() -> None:
    assert read(frame_of(b"one") + frame_of(b"") + frame_of(b"two")) == [b"one", b"", b"two", None]


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_stream_that_ends_within_a_message_is_refused(cut: int) -> None:
    with pytest.raises(MessageError, match="a stream ends within a message"):
        read(frame_of(b"one")[:cut])


def test_a_message_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(MessageError, match="a message is too long") as refused:
        read((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"), ends=False)
    assert refused.value.found == f"{MAX_MESSAGE_BYTES + 1} bytes, at most {MAX_MESSAGE_BYTES}"


def test_a_sender_that_is_silent_or_slow_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "FRAME_S", 0.01)
    for data in (b"", frame_of(b"one")[:5]):
        with pytest.raises(TimeoutError):
            read(data, ends=False, wait_s=0.01)


def endless_awaits(source: Source) -> Iterator[str]:
    """Every await that is neither of a call that ends nor below `asyncio.timeout`."""

    def visit(node: ast.AST, limited: bool) -> Iterator[str]:
        if isinstance(node, ast.AsyncWith):
            limited = limited or any("asyncio.timeout(" in ast.unparse(i) for i in node.items)
        if isinstance(node, ast.Await) and not limited:
            called = node.value.func if isinstance(node.value, ast.Call) else node.value
            name = ast.unparse(called).rpartition(".")[2]
            if name not in ENDING:
                yield f"{source.name}:{node.lineno}: {name}"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, limited)

    yield from visit(source.tree, False)


def test_every_wait_has_an_end() -> None:
    code = [one for one in sources(MEGATRON) if one.module.startswith("megatron.control")]
    assert len(code) == 6
    assert [line for source in code for line in endless_awaits(source)] == []
