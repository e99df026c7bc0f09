"""Scripts run among stand-ins: launchers are written down, and nothing else happens."""

from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tools.launch_scripts.sandbox import Recorded, recorded


def run(folder: Path, text: str, *arguments: str, name: str = "run.sh") -> Recorded:
    script = folder / name
    script.write_text("#!/bin/bash\n" + text)
    with recorded(script, arguments) as done:
        return done


def calls_of(done: Recorded) -> list[str]:
    return [" ".join((call.name, *call.arguments)) for call in done.calls]


def test_variables_arrays_functions_and_arguments_are_expanded(tmp_path: Path) -> None:
    text = """
    set -eu
    N=$((2 * 4)); ARGS=(--a "two words" --n $N)
    launch() { "$PYTHON" a.py "$@"; }
    PYTHON=/opt/conda/bin/python
    torchrun --nproc_per_node $(nvidia-smi --list | wc -l) b.py "${ARGS[@]}" $1
    launch --x 1
    CMD="deepspeed c.py --y"; $CMD 2; eval $CMD 3
    """
    done = run(tmp_path, text, "last")
    assert calls_of(done) == [
        "torchrun --nproc_per_node 8 b.py --a two words --n 8 last",
        "python a.py --x 1",
        "deepspeed c.py --y 2",
        "deepspeed c.py --y 3",
    ]
    assert "two words" in done.calls[0].arguments
    assert (done.status, done.skipped) == (0, ())


def test_launchers_that_are_called_by_their_path_are_written_down_whole(tmp_path: Path) -> None:
    text = """
    CUDA_VISIBLE_DEVICES=0,1 NAME="two words" /opt/conda/bin/python a.py --x 1
    CMD="/opt/conda/bin/python -u b.py --y 2"
    $CMD --z 3
    ALL=(/opt/conda/bin/torchrun --nnodes 1 c.py "two words")
    "${ALL[@]}" --last
    NOTHING=; $NOTHING /opt/conda/bin/python g.py
    exec_it() { exec /opt/conda/bin/python "$@"; }
    (exec_it d.py --w 4)
    command /opt/conda/bin/deepspeed e.py 2>&1 | tee log.txt
    sh -c "/opt/conda/bin/python f.py"
    """
    done = run(tmp_path, text)
    assert calls_of(done) == [
        "python a.py --x 1",
        "python -u b.py --y 2 --z 3",
        "torchrun --nnodes 1 c.py two words --last",
        "python g.py",
        "python d.py --w 4",
        "deepspeed e.py",
        "python f.py",
    ]
    assert "two words" in done.calls[2].arguments
    assert done.skipped == ()


def test_a_batch_script_is_told_what_slurm_would_tell(tmp_path: Path) -> None:
    text = """#SBATCH --nodes=3
#SBATCH --ntasks-per-node 1
    HOST=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
    GRID="--nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_ON_NODE"
    RUN="torchrun $GRID --rdzv_endpoint $HOST --node_rank \\$SLURM_PROCID a.py"
    srun --jobid $SLURM_JOBID -N 3 bash -c "$RUN" 2>&1 | tee log.txt
    """
    done = run(tmp_path, text)
    expected = "torchrun --nnodes 3 --nproc-per-node 8 --rdzv_endpoint node0 --node_rank 0 a.py"
    assert calls_of(done) == [expected]


def test_a_script_that_is_submitted_is_run_and_its_tasks_are_marked(tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text('srun -l sh -c "python -u /m/a.py $FLAGS"\npython b.py\n')
    text = """
    export FLAGS='--x 1'
    sbatch -p batch --nodes=2 --export=FLAGS inner.sh
    sbatch <<EOF
mpirun -n 4 python c.py
EOF
    """
    done = run(tmp_path, text)
    assert calls_of(done) == ["python -u /m/a.py --x 1", "python b.py", "python c.py"]
    assert [call.is_task for call in done.calls] == [True, False, True]


def test_scripts_and_files_beside_it_are_there(tmp_path: Path) -> None:
    (tmp_path / "args.sh").write_text("FLAGS='--b 2'\n")
    (tmp_path / "inner.sh").write_text("source ./args.sh\npython a.py $1 $FLAGS\n")
    done = run(tmp_path, 'cd "$(dirname "$0")"\n./inner.sh --a\nbash inner.sh --c')
    assert calls_of(done) == ["python a.py --a --b 2", "python a.py --c --b 2"]


def test_programs_that_a_script_looks_for_are_there(tmp_path: Path) -> None:
    text = '[ -f "pretrain_gpt.py" ] || exit 1\nmkdir -p out/logs\ntorchrun pretrain_gpt.py --x 1\n'
    assert calls_of(run(tmp_path, text)) == ["torchrun pretrain_gpt.py --x 1"]


def test_what_a_script_writes_can_be_read_while_it_is_looked_at(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("cat <<EOT > ds.json\n{}\nEOT\ndeepspeed a.py --deepspeed_config ds.json\n")
    with recorded(script) as done:
        (call,) = done.calls
        assert (Path(call.folder) / "ds.json").read_text() == "{}\n"
    assert not (tmp_path / "ds.json").exists()
    assert not Path(call.folder).exists()


def test_nothing_is_deleted_overwritten_or_called(tmp_path: Path) -> None:
    precious, marker = tmp_path / "precious", tmp_path / "marker"
    precious.write_text("kept")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/bash\ntouch {marker}\n")
    program.chmod(0o755)
    text = f"""
    set -e
    rm -rf {precious}
    /bin/rm -rf {precious}
    RM=/bin/rm; $RM -rf {precious}
    {program} now
    sed -i s/kept/lost/ {precious}
    pip install something
    source {program}
    (rm {precious}); echo $(/bin/rm {precious})
    bash -c "/bin/rm {precious}"
    sh -c "/bin/rm {precious}"
    A=1 B="2 3" /bin/rm {precious}
    REMOVE=(/bin/rm {precious}); "${{REMOVE[@]}}"
    ALSO="/bin/rm {precious}"; $ALSO
    command /bin/rm {precious}; (exec /bin/rm {precious})
    python a.py
    echo lost > {precious}
    """
    done = run(tmp_path, text)
    assert calls_of(done) == ["python a.py"]
    assert precious.read_text() == "kept"
    assert not marker.exists()
    skipped = "\n".join(done.skipped)
    for words in (f"rm -rf {precious}", f"{program} now", "pip install something", "source"):
        assert words in skipped
    assert "cannot overwrite existing file" in done.said


def test_a_script_that_waits_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("while true; do :; done\n")
    with (
        pytest.raises(ConfigError, match="a launch script does not end"),
        recorded(script, seconds=0.5),
    ):
        pass


def test_a_script_that_exits_and_one_that_is_not_there(tmp_path: Path) -> None:
    done = run(tmp_path, "echo 'set DATA first'; exit 3")
    assert (done.status, done.said, done.calls) == (3, "set DATA first", ())
    with pytest.raises(ConfigError, match="no such script"), recorded(tmp_path / "none.sh"):
        pass
