"""The local checkpoints of a run: saved often and fast, and what a restart goes on from.

What a reader would get wrong: they never replace the checkpoints in --save. A run goes on from a
local one only where it is newer than the last in --save, and only with the same flags on as many
ranks; whatever else there is stays untouched until the next local save.
"""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron import log
from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.files.store import Place
from megatron.checkpoint.files.threads import threads_of_this_rank
from megatron.checkpoint.folder import run_folder
from megatron.checkpoint.folder.manifest import GridLayout
from megatron.checkpoint.local import recovery
from megatron.checkpoint.local.folder import (
    Facts,
    LocalFolder,
    StoredState,
    bytes_of,
    stored_state,
    verified_state,
)
from megatron.checkpoint.local.messages import Listed, Parcel, exchange_files, listing
from megatron.checkpoint.local.opened import OpenedLocal
from megatron.checkpoint.local.recovery import CopyKey, Transfer
from megatron.checkpoint.save.saving import run_on_rank0
from megatron.checkpoint.sharded import ShardedTensor, Snapshot
from megatron.errors import CheckpointError, ConfigError
from megatron.json_values import JsonObject
from megatron.mpu.context import ParallelContext

_SAVING = "writing the local checkpoint"


class LocalCheckpoints:
    """The local checkpoints of one run; all ranks call each method together.

    Args:
        root: the folder on this node, preferably in its memory; it may differ between nodes.
        save: the folder of the run's checkpoints, which tells one run from another.
        jump: from a rank to the next one that holds a copy of its state.
        factor: how many ranks hold the state of one, itself included; 1: no copies.

    Attributes:
        persistent: the iteration of the last checkpoint in `save` at the start; 0: none.
        went_on: whether the run goes on from a local one.

    Raises:
        ConfigError: ranks that hold the same state see one folder. The same on every rank.
    """

    def __init__(
        self, root: Path, save: Place, ctx: ParallelContext, *, jump: int = 1, factor: int = 1
    ) -> None:
        self._ctx, self._save = ctx, save
        self._holders = recovery.holders(ctx.world.size, jump, factor)
        self._held = [owner for owner, ranks in enumerate(self._holders) if ctx.rank in ranks]
        run = run_on_rank0(
            ctx, "reading the id of the run in --save", lambda: run_folder.run_id(save)
        )
        self._folder = LocalFolder(root, run, ctx.world.size)
        self._folders = self._who_sees_what()
        self._refuse_copies_that_share_a_folder()
        self.persistent = run_on_rank0(
            ctx, "looking for the last checkpoint", lambda: last_persistent(save)
        )
        self.went_on = False

    def reserve(self, tensors: Iterable[ShardedTensor]) -> None:
        """Check that each node has room for its states, twice: the new one beside the former.

        Raises:
            ConfigError: it has not. The same on every rank.
        """
        ctx = self._ctx
        state = Snapshot(tuple(tensors), progress={}, config={})
        measured = run_on_all_ranks(
            ctx,
            "looking for room for local checkpoints",
            lambda: (bytes_of(state), self._folder.room()),
        )
        for rank, (_, room) in enumerate(measured):
            held = [
                owner
                for owner, holders in enumerate(self._holders)
                if any(self._folders[holder] == self._folders[rank] for holder in holders)
            ]
            needed = 2 * sum(measured[owner][0] for owner in held)
            if needed > room:
                raise ConfigError(
                    "a node has no room for local checkpoints",
                    found=f"{needed:,} bytes for two of each of {len(held)} ranks, {room:,} free "
                    f"on the node of rank {rank}",
                    fix="drop --non-persistent-save-interval, name a larger folder, or share the "
                    "optimizer's state out (--use-distributed-optimizer)",
                )

    def newest(self, flags: Mapping[str, JsonObject]) -> OpenedLocal | None:
        """Return the local checkpoint to go on from; None where the last one in --save serves.

        States that are lost on one node are fetched from another one that holds them, and so are
        the copies that it held.

        Args:
            flags: those of this run, by groups; only a state of a run with the same serves.

        Raises:
            CheckpointError: a state could not be fetched. The same on every rank.
        """
        ctx = self._ctx
        doing = "looking for local checkpoints"
        looked = run_on_all_ranks(ctx, doing, lambda: self._look(flags))
        reasons = [reason for each in looked for reason in each.passed_over]
        if reasons:
            log.warning("local checkpoints are passed over:\n    " + "\n    ".join(reasons))
        found = recovery.newest_everywhere(
            [each.usable for each in looked], self._folders, self._holders
        )
        if found is None:
            if any(each.usable for each in looked):
                log.warning(
                    "no local checkpoint is there of all ranks: the last one in --save serves"
                )
            return None
        for step in found.steps:
            self._transfer(step, found.iteration, "fetching states of lost local checkpoints")
        log.info(
            f"*** going on from the local checkpoint of iteration {found.iteration} in "
            f"{self._folder.root}; {sum(map(len, found.steps))} states came from other nodes ***"
        )
        directory = self._folder.directory(ctx.rank, found.iteration)
        opened: list[StoredState] = []
        run_on_all_ranks(
            ctx,
            "opening the local checkpoint",
            lambda: opened.append(stored_state(ctx.rank, directory)),
        )
        self.went_on = True
        return OpenedLocal(directory, opened[0].manifest, ctx, self._threads)

    def save(self, snapshot: Snapshot, iteration: int) -> None:
        """Save the state of every rank in its own folder, and with those that hold a copy.

        Former ones are removed once all ranks have the new one.

        Raises:
            CheckpointError: some rank could not. The same on every rank; the former ones stay.
        """
        ctx = self._ctx
        common = run_on_rank0(
            ctx, _SAVING, lambda: Facts(0, secrets.token_hex(8), last_persistent(self._save))
        )
        facts, layout = common._replace(owner=ctx.rank), GridLayout.of(ctx.topology)
        run_on_all_ranks(
            ctx,
            _SAVING,
            lambda: self._folder.write(snapshot, iteration, layout=layout, facts=facts),
        )
        for step in recovery.replication(self._holders):
            self._transfer(step, iteration, "copying local checkpoints to other nodes")

        def remove() -> None:
            for owner in self._held:
                self._folder.keep_only(owner, iteration)

        run_on_all_ranks(ctx, "removing former local checkpoints", remove)
        log.debug(f"local checkpoint of iteration {iteration} in {self._folder.root}")

    def remove(self) -> None:
        """Remove all of them, once the last state of the run is in --save."""

        def remove() -> None:
            for owner in self._held:
                self._folder.remove_owner(owner)

        run_on_all_ranks(self._ctx, "removing local checkpoints", remove)

    @property
    def _threads(self) -> int:
        return threads_of_this_rank([str(one) for one in self._folders], self._ctx.rank)

    def _who_sees_what(self) -> tuple[int, ...]:
        """Return for each rank the first one that sees the same folder."""
        ctx = self._ctx
        doing = "looking for the folder for local checkpoints"
        word = run_on_rank0(ctx, doing, lambda: secrets.token_hex(4))

        def mark() -> None:
            self._folder.make()
            self._folder.mark(ctx.rank, word)

        run_on_all_ranks(ctx, doing, mark)
        seen = run_on_all_ranks(ctx, doing, lambda: self._folder.marks(word)[0])
        run_on_all_ranks(ctx, doing, lambda: self._folder.unmark(ctx.rank))
        return tuple(seen)

    def _refuse_copies_that_share_a_folder(self) -> None:
        for holders in self._holders:
            if len({self._folders[holder] for holder in holders}) < len(holders):
                raise ConfigError(
                    "the copy of a local checkpoint would be lost together with it",
                    found=f"the ranks {', '.join(map(str, holders))} hold the state of rank "
                    f"{holders[0]}, and not each of them has a folder {self._folder.root} of its "
                    "own",
                    fix="set --replication-jump to the number of ranks of a node, or drop "
                    "--replication: on one node there is no other one",
                )

    def _look(self, flags: Mapping[str, JsonObject]) -> "_Looked":
        """Look at this rank's share of the states in its folder."""
        own = self._folders[self._ctx.rank]
        sharing = [rank for rank, folder in enumerate(self._folders) if folder == own]
        share = self._folder.states()[sharing.index(self._ctx.rank) :: len(sharing)]
        usable, reasons = set(), []
        for owner, iteration in share:
            directory = self._folder.directory(owner, iteration)
            try:
                state = verified_state(owner, directory, threads=self._threads)
            except (CheckpointError, OSError) as error:
                reasons.append(f"{directory}: {error}")
                continue
            reason = _why_not(state, flags, self.persistent)
            if reason is None:
                usable.add(state.key)
            else:
                reasons.append(f"{directory} {reason}")
        return _Looked(frozenset(usable), tuple(reasons))

    def _transfer(self, step: Sequence[Transfer], iteration: int, doing: str) -> None:
        """Send the states of `step`; each that arrives is compared with its digests."""
        ctx, rank = self._ctx, self._ctx.rank
        sent = next((one for one in step if one.source == rank), None)
        received = next((one for one in step if one.target == rank), None)

        def begin() -> tuple[Sequence[Listed], Path | None]:
            files: Sequence[Listed] = ()
            if sent is not None:
                files = listing(self._folder.directory(sent.owner, iteration))
            stage = None
            if received is not None:
                stage = self._folder.stage(received.owner, iteration)
            return files, stage

        begun = run_on_all_ranks(ctx, doing, begin)
        stage = begun[rank][1]
        outgoing = incoming = None
        if sent is not None:
            directory = self._folder.directory(sent.owner, iteration)
            outgoing = Parcel(sent.target, directory, begun[rank][0])
        if received is not None and stage is not None:
            incoming = Parcel(received.source, stage, begun[received.source][0])
        failed = exchange_files(outgoing, incoming, ctx.world)

        def end() -> None:
            if failed is not None:
                raise failed
            if received is not None and stage is not None:
                verified_state(received.owner, stage, threads=self._threads)
                self._folder.put_in_place(stage, iteration)

        run_on_all_ranks(ctx, doing, end)


class _Looked(NamedTuple):
    """What one rank found in its folder."""

    usable: frozenset[CopyKey]
    passed_over: tuple[str, ...]  # what is not usable, and why


def last_persistent(save: Place) -> int:
    """Return the iteration of the last checkpoint in --save; 0: there is none, or it is damaged."""
    try:
        return run_folder.latest_iteration(save)
    except CheckpointError:  # whoever loads it says so
        return 0


def _why_not(state: StoredState, flags: Mapping[str, JsonObject], persistent: int) -> str | None:
    """Return why a run with `flags` does not go on from a state; None if it does."""
    if state.key.iteration < persistent:
        return f"is older than iteration {persistent} in --save"
    if state.persistent > persistent:
        return f"is of a run that had saved iteration {state.persistent}, which is gone from --save"
    saved = state.manifest.config
    wanted = json.loads(json.dumps(flags))  # as JSON gives it back
    differing = [
        f"--{name.replace('_', '-')}"
        for group, values in wanted.items()
        for name in sorted({*values, *saved.get(group, {})})
        if values.get(name) != saved.get(group, {}).get(name)
    ]
    return f"is of a run with another {', '.join(differing)}" if differing else None
