"""The paper's two models: an LSTM over words and a linear embedding of sparse features. Their output is the query."""

from typing import Any, final

import torch
from torch import Tensor, nn

from ..head import SoftmaxHead
from .classes import Bags, Classes
from .config import Config
from .outputs import Output, make_output

State = tuple[Tensor, Tensor] | None

_INITIAL = 0.1


@final
class LanguageModel(nn.Module):
    """Words (B, T) to queries (B, T, d) for the next word: embedding, dropout, LSTM.

    There is no dropout after it: of a query that is brought to unit length it would lower all cosines, by the square
    root of what is kept, in training alone, so that the probabilities of the trained model would be too sharp.
    """

    def __init__(
        self, head: Output, num_words: int, dim: int, *, num_layers: int = 1, dropout: float = 0.0, sparse: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, dim, sparse=sparse)
        nn.init.uniform_(self.embedding.weight, -_INITIAL, _INITIAL)
        between = dropout if num_layers > 1 else 0.0
        self.lstm = nn.LSTM(dim, dim, num_layers, batch_first=True, dropout=between)
        self.dropout = nn.Dropout(dropout)
        self.head = head

    def forward(self, words: Tensor, state: State = None) -> tuple[Tensor, State]:
        """Queries, and the state after the last word, cut from the graph, for the words that follow."""
        hidden, (h, c) = self.lstm(self.dropout(self.embedding(words)), state)
        return hidden, (h.detach(), c.detach())


@final
class SparseClassifier(nn.Module):
    """Bags of features to queries (B, d): sum_j x_j v_j, the rows v_j of an embedding (features, d); dropout of x."""

    def __init__(self, head: Output, num_features: int, dim: int, *, dropout: float = 0.0, sparse: bool = True) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(num_features, dim, mode="sum", sparse=sparse)
        nn.init.uniform_(self.embedding.weight, -_INITIAL, _INITIAL)
        self.dropout = nn.Dropout(dropout)
        self.head = head

    def forward(self, bags: Bags, state: State = None) -> tuple[Tensor, State]:
        return self.embedding(bags.indices, bags.offsets, per_sample_weights=self.dropout(bags.values)), None


Model = LanguageModel | SparseClassifier


def make_model(config: Config, classes: Classes) -> Model:
    """The model of a run; `config.seed` decides its first parameters."""
    torch.manual_seed(config.seed)
    head = make_output(config, torch.from_numpy(classes.counts))
    common: dict[str, Any] = {"dropout": config.dropout, "sparse": classes.num_inputs >= config.sparse_from}
    if config.task == "text":
        return LanguageModel(head, classes.num_inputs, config.dim, num_layers=config.layers, **common)
    return SparseClassifier(head, classes.num_inputs, config.dim, **common)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters with dense gradients and those with sparse ones."""
    kinds = (nn.Embedding, nn.EmbeddingBag, SoftmaxHead)
    sparse = [
        parameter
        for module in model.modules()
        if isinstance(module, kinds) and module.sparse
        for parameter in module.parameters(recurse=False)
    ]
    ids = {id(parameter) for parameter in sparse}
    return [parameter for parameter in model.parameters() if id(parameter) not in ids], sparse
