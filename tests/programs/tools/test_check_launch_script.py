"""The program that says what would become of launch scripts, for one script and for a folder."""

import json
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.unit.config.neox.configs import a_config
from tools import check_launch_script

GOOD = """
torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 2 --hidden-size 16 \
    --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 \
    --train-iters 2 --lr 1e-3 --data-path corpus --vocab-file v.json --merge-file m.txt {}
"""


def check(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        check_launch_script.main(argv)
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scripts = {
        "good.sh": GOOD.format(""),
        "notes.slurm": GOOD.format("$1 --DDP-impl local"),
        "refused.sh": GOOD.format("--multi-latent-attention --mtp-num-layers 1"),
        "empty.sh": "exit 2\n",
    }
    (tmp_path / "below").mkdir()
    for name, text in scripts.items():
        (tmp_path / "below" / name).write_text(text)
    return tmp_path


def test_one_script_is_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    below = folder / "below"
    code, text = check(str(below / "good.sh"), capsys=capsys)
    assert code == 0
    assert "pretrain_gpt.py on 4 ranks: works\n" in text
    assert "--tokenizer-type GPT2BPETokenizer" in text
    code, text = check(str(below / "notes.slurm"), "--fp16", capsys=capsys)
    assert code == 0
    assert "--DDP-impl local: accepted" in text
    assert " --fp16" in text
    code, text = check(str(below / "refused.sh"), capsys=capsys)
    assert code == 1
    assert text.count("fix: ") == 2
    code, text = check(str(below / "empty.sh"), capsys=capsys)
    assert code == 1
    assert "it ended with status 2 and started no program" in text


def test_files_that_a_script_writes_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    json = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}'
    flags = "--deepspeed --deepspeed_config ds.json --zero-stage 1"
    script.write_text(f"cat <<EOT > ds.json\n{json}\nEOT\n{GOOD.format(flags)}")
    code, text = check(str(script), capsys=capsys)
    assert code == 0, text


def test_a_folder_is_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(str(folder), capsys=capsys)
    assert code == 1
    lines = text.splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [
        ["below/empty.sh", "starts"],
        ["below/good.sh", "works"],
        ["below/notes.slurm", "works,"],
        ["below/refused.sh", "refused"],
    ]
    assert "(and 1 more)" in lines[3]
    assert lines[-1] == "2 of 4 scripts would run"


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no launch script in the folder"):
        check_launch_script.main([str(tmp_path)])
    with pytest.raises(ConfigError, match="there is no such script"):
        check_launch_script.main([str(tmp_path / "none.sh")])


def test_scripts_of_this_project_that_need_no_file_would_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    examples = Path(__file__).resolve().parents[3] / "examples"
    names = ("pretrain_gpt_tp.sh", "pretrain_bert.sh", "pretrain_gpt_deepspeed.sh")
    for name in (*names, "pretrain_prefix_lm.sh", "pretrain_t5.sh"):
        code, text = check(str(examples / name), capsys=capsys)
        assert code == 0, text


def test_a_script_of_gpt_neox_is_checked_with_its_configs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs" / "sizes").mkdir(parents=True)
    config = a_config(model_parallel_size=2, log_dir="logs")
    (tmp_path / "configs" / "sizes" / "tiny.yml").write_text(json.dumps(config))
    script = tmp_path / "run.sh"
    script.write_text("python ./deepy.py train.py -d configs sizes/$1\n")
    code, text = check(str(script), "tiny", capsys=capsys)
    assert code == 0
    assert "pretrain_gpt.py on 8 ranks: works, with notes" in text
    assert "log_dir: accepted, has no effect here" in text
    assert "--global-batch-size 16" in text
    code, text = check(str(script), "none", capsys=capsys)
    assert code == 1
    assert "--neox-config configs/sizes/none.yml: No such file" in text
