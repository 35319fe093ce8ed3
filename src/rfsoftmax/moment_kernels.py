"""`draw`, `log_prob` and `exclude` of `samplers/moment.py` for CPU tensors, compiled by numba: same in, same out.

The leaves are those of `block_kernels.py`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .block_kernels import block_logits, leaf_query, turned, unturned
from .kernels import _arrays
from .threads import spread
from .tree import MAX_UNIFORM, Query, Tree
from .vectors import embedded


def draw(leaves: Tree, query: Query, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    positions = torch.empty(uniforms.shape, dtype=torch.int64)
    log_q = torch.empty(uniforms.shape, dtype=torch.float64)
    state = _arrays(leaves, query._replace(features=query.features.softmax(1)))
    u, p, q = uniforms.numpy(), positions.numpy(), log_q.numpy()
    cost = query.features.shape[1] + u.shape[1] * leaves.block_size * query.leaf.shape[1]
    spread(_draw, (state, u, p, q), len(u), cost)
    return positions, log_q


def log_prob(leaves: Tree, query: Query, positions: Tensor) -> Tensor:
    log_q = query.features.double().log_softmax(1).gather(1, positions // leaves.block_size)
    state, p, q = _arrays(leaves, query), positions.contiguous().numpy(), log_q.numpy()
    cost = p.shape[1] * leaves.block_size * query.leaf.shape[1]
    spread(_log_prob, (state, p, q), len(p), cost)
    return log_q


def exclude(leaves: Tree, query: Query, log_weight: Tensor) -> None:
    state, weight = _arrays(leaves, query), log_weight.numpy()
    cost = query.excluded.shape[1] * leaves.block_size * query.leaf.shape[1]
    spread(_exclude, (state, weight), len(query.leaf), cost)


@embedded
def _draw(
    state: tuple[Any, ...],
    uniforms: np.ndarray,
    positions: np.ndarray,
    log_q: np.ndarray,
    start: int,
    stop: int,
) -> None:
    block_masses, block_size = state[0], state[12]
    num, ascending, u = uniforms.shape[1], np.empty(uniforms.shape[1]), np.empty(uniforms.shape[1])
    places = np.empty(num, np.int64)
    logits, masses = np.empty(block_size, state[2].dtype), np.empty(block_size, state[2].dtype)
    x = np.empty(state[2].shape[1], state[14].dtype)
    for b in range(start, stop):
        unit = leaf_query(state[2][b], state, x)
        turn = unturned(uniforms[b], ascending)
        all_mass, end = 0.0, block_masses.shape[1] - 1
        for k in range(block_masses.shape[1]):
            all_mass += block_masses[b, k]
        # Rounding may push a uniform past the end: it then means the last block, or class, that has any mass.
        while end > 0 and block_masses[b, end] == 0.0:
            end -= 1
        block, before, cdf, first = 0, 0.0, np.float64(block_masses[b, 0]), 0
        while first < num:
            while block < end and ascending[first] * all_mass >= cdf:
                block += 1
                before = cdf
                cdf += block_masses[b, block]
            last, mass = first, block_masses[b, block]
            while last < num and not (block < end and ascending[last] * all_mass >= cdf):
                u[last] = min(max(ascending[last] * all_mass - before, 0.0) / mass, MAX_UNIFORM)
                last += 1
            size, largest, total = block_logits(block, b, x, unit, logits, masses, state)
            _places(u[first:last], masses[:size], total, places[first:last])
            path = np.log(mass / all_mass) - largest - np.log(total)
            for i in range(first, last):
                log_q[b, turned(i, turn, num)] = path + logits[places[i]]
                positions[b, turned(i, turn, num)] = block * block_size + places[i]
            first = last


@embedded
def _places(u: np.ndarray, masses: np.ndarray, total: float, places: np.ndarray) -> None:
    """The places in masses (b,) of sorted uniforms u (k,)."""
    k, cdf, end = 0, np.float64(masses[0]), masses.shape[0] - 1
    while end > 0 and masses[end] == 0.0:
        end -= 1
    for i in range(u.shape[0]):
        while k < end and u[i] * total >= cdf:
            k += 1
            cdf += masses[k]
        places[i] = k


@embedded
def _log_prob(state: tuple[Any, ...], positions: np.ndarray, log_q: np.ndarray, start: int, stop: int) -> None:
    """Adds log p(i | block) to log_q, which holds log P(block)."""
    block_size = state[12]
    logits, masses = np.empty(block_size, state[2].dtype), np.empty(block_size, state[2].dtype)
    x = np.empty(state[2].shape[1], state[14].dtype)
    for b in range(start, stop):
        unit = leaf_query(state[2][b], state, x)
        for i in range(positions.shape[1]):
            block, place = divmod(positions[b, i], block_size)
            _, largest, total = block_logits(block, b, x, unit, logits, masses, state)
            if logits[place] == -np.inf:
                log_q[b, i] = -np.inf
            else:
                log_q[b, i] += logits[place] - largest - np.log(total)


@embedded
def _exclude(state: tuple[Any, ...], log_weight: np.ndarray, start: int, stop: int) -> None:
    log_masses, excluded, block_size = state[0], state[3], state[12]
    logits, masses = np.empty(block_size, state[2].dtype), np.empty(block_size, state[2].dtype)
    x = np.empty(state[2].shape[1], state[14].dtype)
    for b in range(start, stop):
        unit = leaf_query(state[2][b], state, x)
        for e in range(excluded.shape[1]):
            if excluded[b, e] >= 0:
                block = excluded[b, e] // block_size
                size, _, _ = block_logits(block, b, x, unit, logits, masses, state)
                first = block * block_size
                log_masses[b, block] = _log_mass(log_weight[first : first + size], logits)


@embedded
def _log_mass(log_weight: np.ndarray, logits: np.ndarray) -> float:
    """log A + the mean of o_i - log a_i by weights a_i, over the classes of a block whose logit o_i is not -inf."""
    largest, total, excess = -np.inf, 0.0, 0.0
    for k in range(log_weight.shape[0]):
        if logits[k] > -np.inf:
            largest = max(largest, np.float64(log_weight[k]))
    if largest == -np.inf:
        return largest
    for k in range(log_weight.shape[0]):
        if logits[k] > -np.inf:
            weight = np.exp(log_weight[k] - largest)
            total += weight
            excess += weight * (logits[k] - log_weight[k])
    return largest + np.log(total) + excess / total
