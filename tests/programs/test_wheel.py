"""A wheel outside of any checkout: what is in it, and its programs in another folder.

The wheel is built without csrc/, so that nothing is compiled: the tests of kernels and of sample
maps build the compiled modules. Its programs run in forks of one interpreter that sees the wheel
and no checkout, since the server of `tests/support/warm_python.py` has imported this one.
"""

import configparser
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.programs.test_vit import SMALL
from tests.support.deadlines import HANG_S
from tests.support.launch import ROOT, run_program
from tests.support.vision.images import CLASSES, write_images
from tools import preprocess_data

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETTINGS = PROJECT["tool"]["setuptools"]
PACKAGES = [pattern.rstrip("*") for pattern in SETTINGS["packages"]["find"]["include"]]

# Imports every module of a command from the wheel, then forks a program for each list of words.
DRIVER = """
import importlib, json, os, runpy, sys
site, modules, programs = sys.argv[1:4]
sys.dont_write_bytecode = False  # or each of the programs compiles the same modules
sys.path.insert(0, site)  # before an editable installation of a checkout
import torch._dynamo, megatron, megatron.training, megatron.model.bert_model
print(megatron.__file__, *(importlib.import_module(name).program for name in modules.split()))
for words in json.loads(programs):
    sys.stdout.flush()
    if not (pid := os.fork()):
        name, sys.argv = words[0], list(words)
        if name.endswith(".py"):
            sys.path[:1] = [os.path.dirname(name)]
            runpy.run_path(name, run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        os._exit(0)
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), *words, flush=True)
"""

pytestmark = pytest.mark.slow


class Wheel(NamedTuple):
    """A wheel as pip unpacks it, a folder beside it that is no checkout, and what was run there."""

    site: Path
    elsewhere: Path
    said: str


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    folder = Path(tmp_path_factory.mktemp("wheel"))
    site, elsewhere = folder / "site", folder / "elsewhere"
    build_wheel(folder, site)
    commands = configparser.ConfigParser()
    commands.read(next(site.glob("*.dist-info")) / "entry_points.txt")
    modules = [where.removesuffix(":program") for where in commands["console_scripts"].values()]
    elsewhere.mkdir()
    programs = json.dumps([*vision_programs(site, elsewhere), *retrieval_programs(elsewhere)])
    words = [sys.executable, "-c", DRIVER, str(site), " ".join(modules), programs]
    ended = run_program(words, cwd=elsewhere)
    assert ended.status == 0, ended.text
    return Wheel(site, elsewhere, ended.text)


def build_wheel(folder: Path, site: Path) -> None:
    """Build a wheel of the files that the project names, and unpack it."""
    source = folder / "source"
    for package in PACKAGES:
        left_out = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=left_out)
    modules = [f"{name}.py" for name in SETTINGS["py-modules"]]
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", *modules):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(folder)]
    ended = subprocess.run(build, cwd=source, capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == 0, ended.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(site)
    shutil.rmtree(source)


def vision_programs(site: Path, folder: Path) -> list[list[str]]:
    """A ViT that is trained for a step by a module, and evaluated by a file."""
    write_images(folder / "images" / "train", per_class=4)
    write_images(folder / "images" / "val", per_class=2, first=50)
    flags = [*SMALL[: SMALL.index("--eval-iters")], "--data-path", "images"]
    output = ["--output", "vision.json"]
    main = str(site / "tasks" / "vision" / "main.py")
    return [
        ["pretrain_vit", *flags, "--save", "vit", "--train-iters", "1", "--eval-iters", "0"],
        [main, "--task", "classify", *flags, "--load", "vit", "--epochs", "0", *output],
    ]


def retrieval_programs(folder: Path) -> list[list[str]]:
    """A retriever that is trained for a step, an index of its blocks, and a question."""
    letters = [chr(ord("a") + at) for at in range(26)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, ".", "?"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    lines = [
        {"title": letter, "text": f"{letter.upper()} is a letter. It is one. This is the end."}
        for letter in letters
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "questions.tsv").write_text("d ?\t['d']\n")
    tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase"]
    tokenizer += ["--vocab-file", str(folder / "vocab.txt")]
    for more in (["text", "--split-sentences"], ["title"]):
        words = ["--input", str(folder / "docs.jsonl"), "--output-prefix", str(folder / "docs")]
        preprocess_data.main([*words, "--json-keys", *more, *tokenizer])
    blocks = ["--data-path", "docs_text_sentence", "--titles-data-path", "docs_title_document"]
    model = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 24 --split 1,0,0"
    run = "--micro-batch-size 4 --train-iters 1 --lr 1e-3 --num-workers 0 --device cpu --save ict"
    retriever = ["--load", "ict", "--embedding-path", "index", *blocks]
    questions = ["--qa-data-dev", "questions.tsv", "--output", "scores.json"]
    return [
        ["pretrain_ict", *model.split(), *run.split(), *blocks, *tokenizer, "--eval-iters", "0"],
        ["tools.create_doc_index", *retriever],
        ["tasks.main", "--task", "ICT-ZEROSHOT-NQ", *retriever, *questions],
    ]


def test_a_wheel_has_every_file_of_its_packages(wheel: Wheel) -> None:
    ours = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*")]
    compiled = {".so", ".pyc"}
    named = [path for path in ours if (ROOT / path).is_file() and path.suffix not in compiled]
    assert [path for path in named if not (wheel.site / path).is_file()] == []
    programs = sorted(path.name for path in ROOT.glob("*.py") if path.name != "setup.py")
    assert sorted(path.name for path in wheel.site.glob("*.py")) == programs


def test_every_command_is_found_in_the_wheel(wheel: Wheel) -> None:
    said = wheel.said.splitlines()[0]
    assert said.startswith(str(wheel.site / "megatron" / "__init__.py"))
    assert said.count("<function program") == len(PROJECT["project"]["scripts"])
    programs = {Path(name).stem for name in wheel.site.glob("*.py")}
    assert programs < {where.partition(":")[0] for where in PROJECT["project"]["scripts"].values()}


def test_programs_of_a_wheel_train_and_evaluate_in_another_folder(wheel: Wheel) -> None:
    ends = [line for line in wheel.said.splitlines() if line.startswith("ended with")]
    assert [line.split()[2] for line in ends] == ["0"] * 5, wheel.said
    read = {path.stem: json.loads(path.read_text()) for path in wheel.elsewhere.glob("*.json")}
    assert read["vision"]["images"] == 2 * len(CLASSES)
    assert read["scores"]["dev"]["questions"] == 1
