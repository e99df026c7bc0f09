"""From what a program reads to its three datasets, in the form that the loop takes."""

from collections.abc import Callable

from megatron.config.fields import raise_all
from megatron.data.data_utils import IndexPlace, build_datasets
from megatron.data.kinds.program_data import ProgramData
from megatron.engine.base import DatasetRequest, Datasets


def datasets_of(reads: ProgramData) -> Callable[[DatasetRequest], Datasets]:
    """Return the function for `PretrainTask.datasets` of a program that reads corpora of tokens."""

    def datasets(request: DatasetRequest) -> Datasets:
        """Return the kind of dataset that the flags ask for, over the corpora that they name.

        Raises:
            ConfigError: flags that the datasets of the program do not read.
        """
        raise_all(reads.unread_flags(request.data))
        maker = reads.maker(
            request.data,
            tokenizer=request.tokenizer,
            seed=request.seed,
            is_builder=request.is_builder,
            report_progress=request.report_progress,
        )
        place = IndexPlace(
            cache_path=request.data.data_cache_path,
            is_builder=request.is_builder,
            wait=request.wait,
            report_progress=request.report_progress,
        )
        built = build_datasets(
            maker,
            request.data,
            num_samples=request.num_samples,
            min_samples=request.min_samples,
            place=place,
        )
        return Datasets(*built)

    return datasets
