"""Facts about the run of a DeepSpeed folder, from our record or from Megatron's flags in it.

DeepSpeed's own files hold no facts about the model. A save of ours keeps a `RunRecord` in the
client state; Megatron-DeepSpeed keeps its `args` there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint import model_kind
from megatron.checkpoint.bert_tensors import BertHeads, bert_tensors
from megatron.checkpoint.formats.deepspeed import neox
from megatron.checkpoint.formats.deepspeed.names import known_parameters
from megatron.checkpoint.formats.deepspeed.parameters import RECORD, KnownParameter, RunRecord
from megatron.checkpoint.formats.megatron.args import config_of_args
from megatron.checkpoint.formats.megatron.names import POSITION, WORD, RowOrder, row_order
from megatron.checkpoint.gpt_tensors import gpt_tensors
from megatron.checkpoint.source import SourceBase, SourceOptions, TensorDescription
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.json_values import JsonObject

_LATEST_VERSION = 3.0  # of Megatron's checkpoints, where none is recorded


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """Config groups, progress and scalars as a source gives them, and the order of rows."""

    config: Mapping[str, JsonObject]
    progress: Mapping[str, int]
    rows: RowOrder
    record: RunRecord | None
    vocab_rows: int | None
    is_neox: bool = False

    @classmethod
    def of(
        cls, state: Mapping[str, Any], options: SourceOptions, directory: Path | None = None
    ) -> "FolderFacts":
        """Return the facts in the state of the first model-parallel rank.

        Args:
            directory: the folder, beside whose files gpt-neox keeps its config.

        Raises:
            CheckpointError: our record in it is damaged, or of a newer version.
        """
        if RECORD in state:
            record = RunRecord.from_plain(state[RECORD])
            return cls(record.config, record.progress, RowOrder(), record, None)
        if directory is not None and neox.is_neox(state):
            groups = neox.config_groups(directory)
            order = neox.neox_row_order(groups)
            return cls(groups, _progress(state, {}), order, None, options.vocab_size, is_neox=True)
        args = _fields(state.get("args"))
        config = config_of_args(args) if args else {}
        recorded = state.get("checkpoint_version")  # 0 is a version, too
        version = _LATEST_VERSION if recorded is None else float(recorded)
        info = state.get("checkpoint_info") or {}
        rows = options.vocab_size or info.get("original_vocab_size")
        return cls(config, _progress(state, args), row_order(config, version), None, rows)

    @property
    def grid(self) -> tuple[int, int] | None:
        """(tp, pp) of our record; None where there is none."""
        return None if self.record is None else (self.record.layout.tp, self.record.layout.pp)

    def parameters(self, names: Iterable[str]) -> dict[str, KnownParameter]:
        """Return our parameters by DeepSpeed's `names` of all ranks.

        Raises:
            CheckpointError: an unknown name.
        """
        names = list(names)
        recorded = {} if self.record is None else self.record.parameters
        if all(name in recorded for name in names):
            return {name: recorded[name] for name in names}
        return known_parameters(names, self.config, self.vocab_rows, is_neox=self.is_neox)

    def check_shapes(self, directory: Path, found: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the parameters that were found with those of the model, as far as it is known.

        Raises:
            CheckpointError: one is missing, or of another shape; it names the first.
        """
        expected = self._expected(found)
        wrong = [
            f"{name} is {list(found[name]) if name in found else 'missing'}, not {list(shape)}"
            for name, shape in expected.items()
            if found.get(name) != shape
        ]
        if expected:
            wrong += [f"{name} is of no layer of the model" for name in set(found) - set(expected)]
        if wrong:
            raise CheckpointError(
                "a DeepSpeed checkpoint does not hold the model that it describes",
                found=f"{directory}: {wrong[0]}"
                + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""),
                fix="copy the folder again, from every node that wrote to it, or load another one",
            )

    def _expected(self, found: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
        """Return whole shapes by our names; empty where the model is unknown."""
        if self.record is not None:
            known = self.record.parameters.values()
            return {each.name: each.shape for each in known if each.shape is not None}
        try:
            model = from_plain(ModelConfig, dict(self.config.get("model", {})))
        except ConfigError:
            return {}
        rows = found.get(WORD, (0,))[0] if self.vocab_rows is None else self.vocab_rows
        if self.vocab_rows is not None and found.get(WORD, (0,))[0] < self.vocab_rows:
            rows = found.get(WORD, (0,))[0]  # the load reports that the vocabulary differs
        data: Mapping[str, Any] = self.config.get("data", {})
        positions = model.max_position_embeddings or data.get("seq_length")
        if positions is None and POSITION in found:
            positions = found[POSITION][0]
        if model_kind.kind_from_names(found) == model_kind.GPT:
            return gpt_tensors(model, vocab_rows=rows, positions=positions or 0)
        heads = BertHeads.of(found)
        return bert_tensors(model, vocab_rows=rows, positions=positions or 0, heads=heads)


class FactsSource(SourceBase):
    """What sources of DeepSpeed's two layouts share; `facts` and `_described` are set first."""

    facts: FolderFacts
    _described: Mapping[str, TensorDescription]

    @property
    def tensors(self) -> Mapping[str, TensorDescription]:
        """Dtype and whole shape of weights and optimizer state."""
        return self._described

    @property
    def config(self) -> Mapping[str, JsonObject]:
        """Every flag of a run of ours; of another Megatron's those with a meaning here."""
        return self.facts.config

    @property
    def progress(self) -> Mapping[str, int]:
        """The progress of that run."""
        return self.facts.progress


def scaler_fields(scaler: Any) -> dict[str, float]:
    """Return our loss scaler's equivalent of DeepSpeed's state; empty for a constant scale."""
    fields = _fields(scaler)
    if fields.get("last_overflow_iter") is None:
        return {}
    return {
        "scale": float(fields["cur_scale"]),
        # DeepSpeed counts from its last overflow, and starts at an overflow before the first.
        "good_iterations": (fields["cur_iter"] - 1 - fields["last_overflow_iter"])
        % int(fields["scale_window"]),
        "overflows_left": int(fields.get("cur_hysteresis", 1)),
    }


def _fields(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    return {} if value is None else vars(value)


def _progress(state: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, int]:
    iteration = state.get("iteration", args.get("iteration"))
    if iteration is None:
        iteration = state.get("global_steps", 0)
    known = {
        "iteration": iteration,
        "consumed_samples": args.get("consumed_train_samples"),
        "consumed_tokens": state.get("tokens", args.get("consumed_train_tokens")),
        "consumed_valid_samples": args.get("consumed_valid_samples"),
    }
    return {name: int(value) for name, value in known.items() if value is not None}
