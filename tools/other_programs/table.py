"""Every program of another Megatron that scripts call by its path, and which of ours it is."""

from collections.abc import Mapping

from tools.other_programs.words import Option, OtherProgram

_DETECTED = "layouts and formats are seen in the files"
_CONVERTED: Mapping[str, Option] = {
    "--input_folder": Option(("--load",)),
    "--output_folder": Option(("--save",)),
}
_SIZES = {
    "--target_tp": Option(("--tensor-model-parallel-size",)),
    "--target_pp": Option(("--pipeline-model-parallel-size",)),
}
_ANY_LAYOUT = {
    name: Option(because="any layout loads what is written")
    for name in ("--target_tp", "--target_pp", "--target_dp")
}
_INSPECTED = {name: Option(()) for name in ("--folder", "--input_folder")}
_INSPECTION = OtherProgram(
    "tools.inspect_checkpoint", "what is in a checkpoint of any format", _INSPECTED
)


def _with_defaults_of_generation(words: list[str]) -> list[str]:
    """Add Megatron's defaults: 1024 tokens, prompts that are asked for, or none at all."""
    words = list(words)
    if "--num-tokens" not in words:
        words += ["--num-tokens", "1024"]
    if "--prompt-file" in words:
        if "--output" not in words:
            words += ["--output", f"{words[words.index('--prompt-file') + 1]}.out"]
        return words
    at = words.index("--num-samples") if "--num-samples" in words else None
    if at is None or words[at + 1 : at + 2] == ["0"]:
        kept = words if at is None else [*words[:at], *words[at + 2 :]]
        return [*kept, "--interactive"]
    return [*words, "--prompt", "", "--json"]


# By path below the root. Their names are fixed by the scripts that call them.
PROGRAMS: Mapping[str, OtherProgram] = {
    "tools/generate_samples_gpt.py": OtherProgram(
        "tools.generate_text",
        "text by a trained GPT",
        {
            "--sample-input-file": Option(("--prompt-file",)),
            "--sample-output-file": Option(("--output",)),
            "--genfile": Option(("--output",)),
            "--out-seq-length": Option(("--num-tokens",)),
            "--top_p": Option(("--top-p",)),
            "--top_k": Option(("--top-k",)),
            "--recompute": Option(num_values=0, because="tokens are the same with kept states"),
        },
        completed=_with_defaults_of_generation,
    ),
    "tools/preprocess_data_many_cores.py": OtherProgram(
        "tools.preprocess_data", "text to a corpus; documents stay in their order"
    ),
    "tools/merge_preprocessed_data.py": OtherProgram(
        "tools.merge_datasets",
        "several corpora to one",
        {"--torch-backend": Option(because="ranks talk over gloo")},
    ),
    "tools/merge_mp_partitions.py": OtherProgram(
        "tools.convert_checkpoint",
        "the files of several tensor-parallel ranks to those of one",
        {
            "--model-type": Option(because=_DETECTED),
            "--tensor-model-parallel-size": Option(because=_DETECTED),
            "--pipeline-model-parallel-size": Option(because=_DETECTED),
            "--target-pipeline-model-parallel-size": Option(("--pipeline-model-parallel-size",)),
        },
        first=("--format", "megatron"),
        keeps=("--load", "--save", "--no-optim", "--iteration", "--true-vocab-size", "--help"),
    ),
    "tools/convert_checkpoint/deepspeed_to_megatron.py": OtherProgram(
        "tools.convert_checkpoint",
        "a checkpoint of any format to Megatron's files, without the optimizer's state",
        {
            **_CONVERTED,
            **_SIZES,
            "--for_release": Option(num_values=0, because="the iteration is kept"),
        },
        first=("--format", "megatron", "--no-optim"),
    ),
    "tools/convert_checkpoint/deepspeed_to_transformers.py": OtherProgram(
        "tools.convert_checkpoint",
        "a checkpoint of any format to a folder of Hugging Face",
        {
            **_CONVERTED,
            **_ANY_LAYOUT,
            "--for_release": Option(num_values=0, because="a folder has no iterations"),
        },
        first=("--format", "huggingface"),
    ),
    "tools/convert_checkpoint/deepspeed_to_deepspeed.py": OtherProgram(
        "tools.convert_checkpoint",
        "a checkpoint of any format to DeepSpeed's universal form, which any layout loads",
        {**_CONVERTED, **_ANY_LAYOUT},
        first=("--format", "universal"),
    ),
    "tools/convert_checkpoint/ds_to_universal.py": OtherProgram(
        "tools.convert_checkpoint",
        "a checkpoint of any format to DeepSpeed's universal form",
        {
            **_CONVERTED,
            "--num_extract_workers": Option(because="tensors are copied one after the other"),
            "--num_merge_workers": Option(because="tensors are copied one after the other"),
            "--keep_temp_folder": Option(num_values=0, because="there is none"),
        },
        first=("--format", "universal"),
    ),
    "tools/convert_checkpoint/inspect_checkpoint.py": _INSPECTION,
    "tools/convert_checkpoint/inspect_deepspeed_checkpoint.py": _INSPECTION,
    "tools/create_doc_index.py": OtherProgram(
        "tools.retrieval.create_doc_index", "an index of the vectors of blocks of text"
    ),
    "tasks/eval_harness/evaluate.py": OtherProgram(
        "tasks.main", "EleutherAI's evaluation harness", first=("--task", "LM-EVAL")
    ),
}
