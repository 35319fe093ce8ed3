"""Sampled softmax for PyTorch whose cost grows with log n: random Fourier features, one tree, exact log q."""

from .advisor import Advice, advise, advise_head
from .features import (
    FeatureMap,
    OrthogonalFourier,
    PositiveRandom,
    Quadratic,
    RandomFourier,
    RandomMaclaurin,
    StructuredFourier,
)
from .head import SoftmaxHead
from .losses import full_softmax_loss, nce_loss, sampled_softmax_loss
from .optimizers import SparseAdam
from .samplers import (
    DEFAULT_TAU,
    ExactSampler,
    InBatchSampler,
    KernelSampler,
    LogUniformSampler,
    LSHSampler,
    MIDXSampler,
    MixtureSampler,
    MomentSampler,
    Sampler,
    Samples,
    UniformSampler,
    UnigramSampler,
    make_sampler,
)
from .sharded import ShardedSoftmaxHead
from .sharded_checkpoints import load_checkpoint, save_checkpoint

__all__ = [
    "DEFAULT_TAU",
    "Advice",
    "ExactSampler",
    "FeatureMap",
    "InBatchSampler",
    "KernelSampler",
    "LSHSampler",
    "LogUniformSampler",
    "MIDXSampler",
    "MixtureSampler",
    "MomentSampler",
    "OrthogonalFourier",
    "PositiveRandom",
    "Quadratic",
    "RandomFourier",
    "RandomMaclaurin",
    "Sampler",
    "Samples",
    "ShardedSoftmaxHead",
    "SoftmaxHead",
    "SparseAdam",
    "StructuredFourier",
    "UniformSampler",
    "UnigramSampler",
    "advise",
    "advise_head",
    "full_softmax_loss",
    "load_checkpoint",
    "make_sampler",
    "nce_loss",
    "sampled_softmax_loss",
    "save_checkpoint",
]
