"""Files that travel between ranks in blocks, in both directions at once."""

from pathlib import Path
from unittest.mock import patch

from megatron.checkpoint.local import messages
from megatron.checkpoint.local.messages import Listed, Parcel, exchange_files, listing
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.ranks import run_on_ranks

BLOCK = 64
# Of rank 0 and of rank 1: files that end inside of blocks and between them, and unlike totals.
SIZES = ((1, 63, 64, 200), (130, 5))


def content(rank: int, at: int) -> bytes:
    return bytes((rank + at + i) % 251 for i in range(SIZES[rank][at]))


def make(folder: Path, rank: int) -> tuple[Listed, ...]:
    folder.mkdir(parents=True)
    for at in range(len(SIZES[rank])):
        (folder / f"file-{at}").write_bytes(content(rank, at))
    return listing(folder)


def wrong_files(place: Path, shorter: bool) -> list[str]:
    """Exchange the files of two ranks; return those that are not what was sent, and errors."""
    ctx = ParallelContext.build(Topology(dp=2))
    own, peer = ctx.rank, 1 - ctx.rank
    sent, arrived = place / f"{own}" / "own", place / f"{own}" / "arrived"
    listed = make(sent, own)
    arrived.mkdir()
    if shorter and own == 0:
        (sent / "file-3").write_bytes(b"short")
    expected = tuple(Listed(f"file-{at}", size) for at, size in enumerate(SIZES[peer]))
    with patch.object(messages, "BLOCK_BYTES", BLOCK):
        error = exchange_files(
            Parcel(peer, sent, listed), Parcel(peer, arrived, expected), ctx.world
        )
    wrong = [
        file.name
        for at, file in enumerate(expected)
        if (arrived / file.name).read_bytes() != content(peer, at)
    ]
    return [*wrong, *([] if error is None else [str(error.strerror)])]


def test_files_arrive_as_they_were(tmp_path: Path) -> None:
    assert run_on_ranks(2, wrong_files, tmp_path, False) == [[], []]


def test_a_file_that_shrank_is_an_error_of_its_rank_and_no_peer_waits(tmp_path: Path) -> None:
    sender, receiver = run_on_ranks(2, wrong_files, tmp_path, True)
    assert sender == ["the file has become shorter"]
    assert receiver == ["file-3"], "the digests of the state then show it"


def one_way(place: Path) -> int:
    """Send files from rank 0 to rank 2, while rank 1 takes part in nothing."""
    ctx = ParallelContext.build(Topology(dp=3))
    folder = place / "sent"
    expected = tuple(Listed(f"file-{at}", size) for at, size in enumerate(SIZES[0]))
    if ctx.rank == 0:
        make(folder, 0)
        return int(exchange_files(Parcel(2, folder, expected), None, ctx.world) is None)
    if ctx.rank == 1:
        return int(exchange_files(None, None, ctx.world) is None)
    arrived = place / "arrived"
    arrived.mkdir()
    assert exchange_files(None, Parcel(0, arrived, expected), ctx.world) is None
    return sum((arrived / f"file-{at}").read_bytes() == content(0, at) for at in range(4))


def test_a_rank_may_only_send_or_only_receive(tmp_path: Path) -> None:
    assert run_on_ranks(3, one_way, tmp_path) == [1, 1, 4]
