"""What a call of a launcher starts: the program, its flags, the number of ranks."""

import pytest

from tools.launch_scripts.commands import Started, known_name, started_by
from tools.launch_scripts.sandbox import LauncherCall

FLAGS = ("--lr", "1e-4")


@pytest.mark.parametrize(
    ("call", "ranks"),
    [
        ("python pretrain_gpt.py", 1),
        ("python3 -u pretrain_gpt.py", 1),
        ("torchrun pretrain_gpt.py", 1),
        ("torchrun --standalone --nproc-per-node 4 pretrain_gpt.py", 4),
        ("torchrun --nproc_per_node=8 --nnodes=2 --node_rank 0 pretrain_gpt.py", 16),
        ("torchrun --nproc_per_node 8 --nnodes 1:4 pretrain_gpt.py", 32),
        ("torchrun --nproc_per_node gpu pretrain_gpt.py", None),
        ("python examples/torchrun.py --nproc-per-node 4 pretrain_gpt.py", 4),
        ("python -m torch.distributed.launch --nproc_per_node 8 pretrain_gpt.py", 8),
        ("python -u -m torch.distributed.run --nproc-per-node 2 pretrain_gpt.py", 2),
        ("deepspeed --num_nodes 2 --num_gpus 4 pretrain_gpt.py", 8),
        ("deepspeed --hostfile hosts pretrain_gpt.py", None),
        ("python -m deepspeed.launcher.runner --num_gpus 4 pretrain_gpt.py", 4),
        ("accelerate launch --num_processes 6 pretrain_gpt.py", 6),
    ],
)
def test_ranks_are_those_that_the_launcher_is_told(call: str, ranks: int | None) -> None:
    name, *words = call.split()
    found = started_by(LauncherCall(name, "/", (*words, *FLAGS)))
    assert found == Started("pretrain_gpt.py", FLAGS, ranks)


def test_tasks_of_slurm_are_an_unknown_number_unless_a_launcher_is_told() -> None:
    call = LauncherCall("python", "/", ("-u", "pretrain_gpt.py", *FLAGS), is_task=True)
    assert started_by(call) == Started("pretrain_gpt.py", FLAGS, None)
    words = ("--nnodes", "2", "--nproc-per-node", "8", "pretrain_gpt.py")
    started = started_by(LauncherCall("torchrun", "/", words, is_task=True))
    assert started == Started("pretrain_gpt.py", (), 16)


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("./deepy.py train.py configs/125M.yml local.yml", "configs/125M.yml local.yml"),
        ("deepy.py train.py -d configs 125M local", "configs/125M configs/local"),
        ("deepy.py train.py --conf_dir configs 125M.yml", "configs/125M.yml"),
        ("deepy.py train.py 125M.yml --wandb_group mine", "125M.yml --wandb_group mine"),
    ],
)
def test_the_launcher_of_gpt_neox_names_config_files(words: str, flags: str) -> None:
    found = started_by(LauncherCall("python", "/", tuple(words.split())))
    assert found == Started("pretrain_gpt.py", ("--neox-config", *flags.split()), 8)


def test_other_programs_of_gpt_neox_keep_their_names() -> None:
    found = started_by(LauncherCall("python", "/", ("deepy.py", "generate.py", "a.yml")))
    assert found == Started("generate.py", ("--neox-config", "a.yml"), 8)
    assert started_by(LauncherCall("python", "/", ("deepy.py",))) is None


def test_a_module_is_its_file() -> None:
    found = started_by(LauncherCall("python", "/", ("-m", "tools.preprocess_data", *FLAGS)))
    assert found == Started("tools/preprocess_data.py", FLAGS, 1)
    both = started_by(
        LauncherCall("torchrun", "/", ("--nproc-per-node", "2", "-m", "tasks.main", *FLAGS))
    )
    assert both == Started("tasks/main.py", FLAGS, 2)


@pytest.mark.parametrize("words", ["-c print(1)", "-", "", "--version", "-m"])
def test_what_is_no_program_is_left_out(words: str) -> None:
    assert started_by(LauncherCall("python", "/", tuple(words.split()))) is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/opt/Megatron/pretrain_gpt.py", "pretrain_gpt.py"),
        ("../../pretrain_gpt.py", "pretrain_gpt.py"),
        ("/opt/Megatron/tools/preprocess_data.py", "tools/preprocess_data.py"),
        ("tasks/eval_harness/evaluate.py", "tasks/eval_harness/evaluate.py"),
    ],
)
def test_a_program_is_known_by_its_place_in_its_repository(path: str, name: str) -> None:
    assert known_name(path) == name
