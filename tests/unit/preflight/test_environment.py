"""What a launcher sets is read whole, or refused."""

import pytest

from megatron.errors import ConfigError
from megatron.preflight.environment import Launch, launch_from_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_no_launcher_is_one_process() -> None:
    assert launch_from_environment({}) == Launch()
    assert launch_from_environment({"LOCAL_RANK": "3"}) == Launch()


def test_torchrun_is_understood() -> None:
    assert launch_from_environment(TORCHRUN) == Launch(5, 8, 1, 4, has_rendezvous=True)


def test_without_local_numbers_all_ranks_are_on_one_node() -> None:
    given = {name: value for name, value in TORCHRUN.items() if not name.startswith("LOCAL")}
    assert launch_from_environment(given) == Launch(5, 8, 5, 8, has_rendezvous=True)


@pytest.mark.parametrize(
    ("changes", "problem", "found"),
    [
        ({"MASTER_PORT": None}, "only part of what ranks need", "no MASTER_PORT"),
        ({"WORLD_SIZE": None}, "only part of what ranks need", "no WORLD_SIZE"),
        ({"RANK": "five"}, "not a number", "RANK=five"),
        ({"LOCAL_RANK": ""}, "not a number", "LOCAL_RANK="),
        ({"RANK": "8"}, "contradict each other", "RANK=8 WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "contradict each other", "LOCAL_RANK=4 LOCAL_WORLD_SIZE=4"),
        ({"RANK": "-1"}, "contradict each other", "RANK=-1"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    changes: dict[str, str | None], problem: str, found: str
) -> None:
    given = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=problem) as caught:
        launch_from_environment(given)
    assert found in str(caught.value)
