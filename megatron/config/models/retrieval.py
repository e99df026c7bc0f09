"""RetrievalConfig: the two towers of a retriever, what they begin with, and what they learn from.

Flags of the programs that index blocks and answer questions are those programs' own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.fields import check_field, flag, raise_all
from megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalConfig:
    """Two BERTs that map questions and blocks of text to vectors of one space."""

    biencoder_projection_dim: int = flag(
        0,
        aliases=("--ict-head-size",),
        help="numbers of a vector, projected from the state of the class token; 0: that state",
    )
    biencoder_shared_query_context_model: bool = flag(
        False, help="use one tower for both questions and blocks"
    )
    retriever_score_scaling: bool = flag(
        False, help="divide scores of questions and blocks by the root of the hidden size"
    )
    retriever_report_topk_accuracies: tuple[int, ...] = flag(
        (), help="report in evaluations how often the right block is among so many first ones"
    )
    bert_load: str | None = flag(
        None, help="begin each tower with the encoder of the BERT in this folder"
    )
    titles_data_path: str | None = flag(
        None, help="corpus with the title of each document, an item each"
    )
    query_in_block_prob: float = flag(
        0.1, help="share of questions that stay in the block that they were taken from"
    )
    use_one_sent_docs: bool = flag(False, help="take documents of one sentence as blocks too")

    def __post_init__(self) -> None:
        raise_all(self._problems())

    @property
    def towers(self) -> tuple[str, str]:
        """The names before those of the parameters: of questions, and of blocks."""
        if self.biencoder_shared_query_context_model:
            return ("shared", "shared")
        return ("query", "context")

    def _problems(self) -> Iterator[ConfigError]:
        yield from check_field(
            self.biencoder_projection_dim >= 0,
            "biencoder_projection_dim",
            self.biencoder_projection_dim,
            problem="a vector has a negative number of numbers",
            fix="use 128, or 0 for the hidden size",
        )
        yield from check_field(
            0 <= self.query_in_block_prob <= 1,
            "query_in_block_prob",
            self.query_in_block_prob,
            problem="a share is not between 0 and 1",
            fix="use 0.1",
        )
        ranks = self.retriever_report_topk_accuracies
        yield from check_field(
            all(k > 0 for k in ranks) and len(set(ranks)) == len(ranks),
            "retriever_report_topk_accuracies",
            " ".join(map(str, ranks)),
            problem="an accuracy is among no blocks, or asked for twice",
            fix="use 1 5 20",
        )
