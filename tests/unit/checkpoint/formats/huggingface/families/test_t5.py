"""T5s that `transformers` writes are read to the same scores, and written to the same bits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron import log
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.huggingface.writer import write_huggingface
from megatron.checkpoint.formats.native.source import ShardedSource, write_sharded
from megatron.checkpoint.source import SourceBase, SourceOptions, WriteOptions
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.data.samples.decoder_marks import DecoderMarks
from megatron.errors import CheckpointError
from megatron.tokenizer.tokenizer import TokenizerSpec
from tests.support.t5.huggingface import CASES, SAME, VOCABULARY, expected, outputs_of, save_t5
from tests.unit.tokenizer.vocabularies import write_sentencepiece

# What an error of any kind moves scores by at least, fifty times rounding.
WRONG = 50 * SAME


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of each case, written once and never changed."""
    root, written = tmp_path_factory.mktemp("t5"), {}

    def folder(case: str) -> Path:
        if case not in written:
            written[case] = save_t5(case, root / str(len(written)))
        return written[case]

    return folder


def opened(directory: Path) -> HuggingFaceSource:
    return HuggingFaceSource(directory, SourceOptions())


def stored(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return found


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = stored(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def config_of(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))


def apart(source: SourceBase, like: HuggingFaceSource, folder: Path) -> float:
    (wanted,) = expected(folder, like).values()
    (found,) = outputs_of(source, like).values()
    assert found.shape == wanted.shape == (2, 33, VOCABULARY)
    assert wanted.abs().max() > 1
    return float((found - wanted).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_transformers(case: str, folders: Callable[[str], Path]) -> None:
    with opened(folders(case)) as source:
        assert apart(source, source, folders(case)) <= SAME


class Changed(SourceBase):
    """A source with another config, or with other weights by name."""

    format_name = "changed"

    def __init__(
        self, source: HuggingFaceSource, model: dict[str, Any], swapped: tuple[str, ...]
    ) -> None:
        self._source = source
        one, other = (f"model/{name}.weight" for name in swapped or ("", ""))
        self._names = {one: other, other: one}
        self.directory, self.tensors = source.directory, source.tensors
        self.config = {"model": {**source.config["model"], **model}}
        self.progress = self.scalars = {}

    def read(self, name: str, box: Box) -> Tensor:
        return self._source.read(self._names.get(name, name), box)


@pytest.mark.parametrize(
    ("case", "model", "swapped"),
    [
        ("1.0", {}, ("encoder.relative_positions", "decoder.relative_positions")),
        ("1.0", {}, ("decoder.layers.0.cross_norm", "decoder.layers.0.post_attention_norm")),
        ("1.0", {}, tuple(f"decoder.layers.{at}.cross_attention.query" for at in (1, 2))),
        ("1.0", {}, ("encoder.final_norm", "decoder.final_norm")),
        ("1.1", {}, ("embedding.word", "output")),
        ("1.0", {"logit_divisor": 1.0}, ()),
        ("1.1", {"logit_divisor": 4.0}, ()),
        ("1.0", {"softmax_scale": None}, ()),
        ("1.1", {"glu_activation": "geglu"}, ()),
        ("1.0", {"layernorm_epsilon": 1e-3}, ()),
    ],
)
def test_what_is_read_wrongly_shows_in_the_scores(
    case: str, model: dict[str, Any], swapped: tuple[str, ...], folders: Callable[[str], Path]
) -> None:
    with opened(folders(case)) as source:
        assert apart(Changed(source, model, swapped), source, folders(case)) > WRONG


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_through_our_own_format_keeps_every_bit(
    case: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    there = folders(case)
    with opened(there) as source:
        ours = write_sharded(source, tmp_path / "ours")
    with ShardedSource(ours) as source:
        assert source.kind == "t5"
        back = write_huggingface(source, tmp_path / "back", WriteOptions())
    before, after = stored(there), stored(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    one, other = (
        transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (there, back)
    )
    different = {key for key in one if one[key] != other.get(key)}
    assert different <= {"_name_or_path", "dtype", "decoder_start_token_id"}
    model, report = transformers.T5ForConditionalGeneration.from_pretrained(
        back, output_loading_info=True
    )
    assert not any(report.values())
    if case != "1.0":
        assert not torch.equal(model.lm_head.weight, model.shared.weight)


def test_files_of_old_releases_are_read(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """As on the hub: google/t5-v1_1-small and google/flan-t5-small, but for their sizes."""
    folder = save_t5("1.1", tmp_path / "old")

    def change(tensors: dict[str, Tensor]) -> None:
        for stack in ("encoder", "decoder"):
            tensors[f"{stack}.embed_tokens.weight"] = tensors["shared.weight"].clone()
        name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        tensors[name] = torch.zeros(8, 4)

    rewrite(folder, change)
    config_of(
        folder,
        tie_word_embeddings=False,
        scale_decoder_outputs="absent",
        n_positions=512,
        output_past=True,
    )
    with opened(folder) as source, opened(folders("1.1")) as new:
        (one,), (other,) = outputs_of(source, source).values(), outputs_of(new, new).values()
        assert torch.equal(one, other)


def test_what_the_run_of_a_folder_is(folders: Callable[[str], Path]) -> None:
    with opened(folders("1.0")) as source:
        model = from_plain(ModelConfig, source.config["model"])
        assert source.kind == "t5"
        assert source.sizes.decoder == from_plain(
            EncoderDecoderConfig, source.config["encoder_decoder"]
        )
        assert source.sizes.decoder == EncoderDecoderConfig(
            decoder_num_layers=3,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=20,
        )
    assert (model.logit_divisor, model.softmax_scale, model.tied) == (4.0, 1.0, True)
    assert (model.kv_channels, model.ffn_width, model.num_layers) == (6, 24, 2)


@pytest.mark.parametrize("case", CASES)
def test_all_that_transformers_writes_is_read(
    case: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(log, "warning", warnings.append)
    opened(folders(case)).close()
    assert warnings == []


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("1.0", {"feed_forward_proj": "quick_gelu"}, "'feed_forward_proj' is 'quick_gelu'"),
        ("1.1", {"dense_act_fn": "gelu"}, "'dense_act_fn' is 'gelu'"),
        ("1.1", {"is_gated_act": False}, "'is_gated_act' is False"),
        ("1.0", {"decoder_start_token_id": 5}, "'decoder_start_token_id' is 5"),
    ],
)
def test_what_no_model_here_computes_is_refused_by_field_and_value(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_t5(case, tmp_path / "m")
    config_of(folder, **changes)
    with pytest.raises(CheckpointError, match="something that no model here does") as caught:
        opened(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("case", "change", "problem", "message"),
    [
        (
            "1.0",
            lambda t: t.update({"lm_head.weight": torch.zeros(VOCABULARY, 16)}),
            "ties the output projection to the embedding",
            "lm_head.weight is not the word embedding",
        ),
        (
            "1.1",
            lambda t: t.update({"decoder.embed_tokens.weight": torch.zeros(VOCABULARY, 16)}),
            "hold one tensor of the model twice, with two values",
            "decoder.embed_tokens.weight and another key of embedding.word.weight",
        ),
        (
            "1.1",
            lambda t: t.pop("lm_head.weight"),
            "do not hold the t5 model",
            "missing: lm_head.weight",
        ),
        (
            "1.0",
            lambda t: t.pop("decoder.block.2.layer.1.EncDecAttention.k.weight"),
            "do not hold the t5 model",
            "missing: decoder.block.2.layer.1.EncDecAttention.k.weight",
        ),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    case: str,
    change: Callable[[dict[str, Tensor]], Any],
    problem: str,
    message: str,
    tmp_path: Path,
) -> None:
    folder = save_t5(case, tmp_path / "m")
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=problem) as caught:
        opened(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_divisor": 1.0}, r"--logit-divisor 1\.0 \(t5 has 4\.0\)"),
        ({"add_bias_linear": True}, r"--add-bias-linear True \(t5 has False\)"),
        ({"position_embedding_type": "rope"}, r"--position-embedding-type rope"),
    ],
)
def test_what_t5_does_not_have_is_refused_by_flag(
    changes: dict[str, Any], message: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    with opened(folders("1.0")) as source:
        changed = Changed(source, changes, ())
        with pytest.raises(CheckpointError, match=message):
            write_huggingface(changed, tmp_path / "back", WriteOptions())


@pytest.mark.parametrize(
    ("recorded", "found"),
    [({"relative_attention_num_buckets": 3}, "not an even number"), ({}, "no decoder_num_layers")],
)
def test_a_decoder_that_is_not_recorded_is_refused(
    recorded: dict[str, Any], found: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    with opened(folders("1.0")) as source:
        changed = Changed(source, {}, ())
        changed.config["encoder_decoder"] = recorded
        with pytest.raises(CheckpointError, match="not record the decoder of its weights") as error:
            write_huggingface(changed, tmp_path / "back", WriteOptions())
        assert found in str(error.value)


def save_tokenizer(folder: Path) -> transformers.T5Tokenizer:
    """A unigram vocabulary in the order of T5's: sentinels behind it, the first one last."""
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", "\u2581the", "\u2581cat", *"abcdefghijklm"]
    scores = [0.0, 0.0, 0.0, *(-float(at) for at in range(3, len(pieces)))]
    sentinels = [(f"<extra_id_{at}>", 0.0) for at in (2, 1, 0)]
    made = transformers.T5Tokenizer(vocab=[*zip(pieces, scores), *sentinels], extra_ids=3)
    made.save_pretrained(folder)
    return made


def test_a_tokenizer_with_sentinels_is_read_and_written(tmp_path: Path) -> None:
    folder = save_t5("1.0", tmp_path / "m")
    theirs = save_tokenizer(folder)
    with opened(folder) as source:
        flags = {**source.config["tokenizer"], "vocab_extra_ids": 3}
        back = write_huggingface(source, tmp_path / "back", WriteOptions())
    flags.pop("true_vocab_size")
    ours = TokenizerSpec(**flags).build()
    text = "the cat <extra_id_0> bad <extra_id_1>"
    assert [*ours.tokenize(text), 1] == theirs(text)["input_ids"]
    assert ours.extra_ids == tuple(
        theirs.convert_tokens_to_ids(f"<extra_id_{at}>") for at in range(3)
    )
    assert ours.extra_ids[0] > ours.extra_ids[1]
    assert DecoderMarks.of(ours) == (0, 1, 0)
    for file in ("config.json", "generation_config.json"):
        values = json.loads((back / file).read_text())
        ids = [values[f"{role}_token_id"] for role in ("decoder_start", "eos", "pad")]
        assert ids == [0, 1, 0]
    assert transformers.AutoTokenizer.from_pretrained(back)(text) == theirs(text)


def train_pieces(folder: Path) -> None:
    """A unigram model with the special pieces of T5's, and nothing beside it."""
    settings = {"model_type": "unigram", "vocab_size": 40, "hard_vocab_limit": False}
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "pad_piece": "<pad>"}
    write_sentencepiece(folder, **settings, **ids).rename(folder / "spiece.model")


@pytest.mark.parametrize("settings", [None, {"extra_ids": 3}])
def test_a_sentencepiece_model_alone_is_a_tokenizer(
    tmp_path: Path, settings: dict[str, int] | None
) -> None:
    folder = save_t5("1.0", tmp_path / "m")
    train_pieces(folder)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with opened(folder) as source:
        flags = dict(source.config["tokenizer"])
        back = write_huggingface(source, tmp_path / "back", WriteOptions())
    flags.pop("true_vocab_size")
    ours = TokenizerSpec(**flags).build()
    count = 100 if settings is None else 3
    pieces = ours.vocab_size - count
    # Sentinels fall, as those of T5's releases from 32,099 to 32,000.
    assert ours.extra_ids == tuple(range(ours.vocab_size - 1, pieces - 1, -1))
    assert DecoderMarks.of(ours) == (0, 1, 0)
    assert (back / "spiece.model").read_bytes() == (folder / "spiece.model").read_bytes()
    theirs = transformers.AutoTokenizer.from_pretrained(back)
    text = "the quick fox <extra_id_0> the dog <extra_id_2>"
    assert [*ours.tokenize(text), 1] == theirs(text)["input_ids"]
    with opened(back) as source:
        assert source.config["tokenizer"]["vocab_extra_ids"] == count


def test_a_number_of_sentinels_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = save_t5("1.0", tmp_path / "m")
    (folder / "spiece.model").write_bytes(b"")
    (folder / "tokenizer_config.json").write_text('{"extra_ids": "many"}')
    with opened(folder) as source, pytest.raises(CheckpointError, match="cannot be read") as error:
        assert source.config
    assert "extra_ids is 'many'" in str(error.value)
