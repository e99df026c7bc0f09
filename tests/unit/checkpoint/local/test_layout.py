"""Where states lie: only whole ones are seen, of the right run and of as many ranks."""

from pathlib import Path

from megatron.checkpoint.folder.run_folder import RUN_ID, iteration_name, run_id
from megatron.checkpoint.local.layout import Lying, newest_iteration, owner_name, states_in


def put(run: Path, owner: int, iteration: int, *, world: int = 4) -> Path:
    state = run / owner_name(owner, world) / iteration_name(iteration)
    state.mkdir(parents=True)
    return state


def test_only_whole_states_are_seen(tmp_path: Path) -> None:
    put(tmp_path, 3, 7)
    put(tmp_path, 0, 8, world=2)
    (tmp_path / owner_name(0, 4) / ".iter_0000009.partial-1f3a5c7e").mkdir(parents=True)
    (tmp_path / "rank-1-of-4" / iteration_name(9)).mkdir(parents=True)
    assert sorted(states_in(tmp_path)) == [Lying(0, 8, 2), Lying(3, 7, 4)]
    assert list(states_in(tmp_path / "elsewhere")) == []


def test_a_supervisor_sees_how_far_its_own_run_is(tmp_path: Path) -> None:
    save, root = tmp_path / "save", tmp_path / "memory"
    assert newest_iteration(root, save) is None
    assert not (save / RUN_ID).exists(), "looking made an id"
    run = root / run_id(save)
    assert newest_iteration(root, save) is None
    put(run, 0, 3)
    put(run, 1, 4)
    put(root / run_id(tmp_path / "other"), 0, 9)
    assert newest_iteration(root, save) == 4
