"""Attention that is not exact, in float64: a window, the top k keys, and a low rank of the scores.

What claim 11 compares with rounding: errors that have structure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from emulation.tracking import F64


def _scores(q: F64, k: F64, causal: bool) -> F64:
    s = q @ k.T / np.sqrt(q.shape[1])
    if causal:
        n_q, n_k = s.shape
        s = np.where(np.arange(n_k) <= np.arange(n_q)[:, None] + (n_k - n_q), s, -np.inf)
    return np.asarray(s, np.float64)


def _softmax(s: F64) -> F64:
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def exact(q: F64, k: F64, v: F64, causal: bool) -> F64:
    """softmax(q k^T / sqrt(D)) v."""
    return _softmax(_scores(q, k, causal)) @ v


def window(q: F64, k: F64, v: F64, causal: bool) -> F64:
    """Only the nearest eighth of the keys."""
    s = _scores(q, k, causal)
    n_q, n_k = s.shape
    distance = np.abs(np.arange(n_k) - np.arange(n_q)[:, None] - (n_k - n_q))
    return _softmax(np.where(distance <= n_k // 8, s, -np.inf)) @ v


def top_k(q: F64, k: F64, v: F64, causal: bool) -> F64:
    """Only the largest eighth of each row's scores."""
    s = _scores(q, k, causal)
    kept = max(1, s.shape[1] // 8)
    least = np.sort(s, axis=1)[:, -kept][:, None]
    return _softmax(np.where(s >= least, s, -np.inf)) @ v


def low_rank(q: F64, k: F64, v: F64, causal: bool) -> F64:
    """Keys and values of every block of eight replaced by their mean (a pooled, low-rank P)."""
    n = k.shape[0] // 8 * 8
    if not n:
        return exact(q, k, v, causal)
    pooled = np.concatenate([np.repeat(k[:n].reshape(-1, 8, k.shape[1]).mean(1), 8, 0), k[n:]])
    return _softmax(_scores(q, pooled, causal)) @ v


APPROXIMATIONS: dict[str, Callable[[F64, F64, F64, bool], F64]] = {
    "window of N/8": window,
    "top N/8": top_k,
    "keys pooled by 8": low_rank,
}


def structure(error: F64, output: F64) -> dict[str, Any]:
    """How an error (rows, D) is made.

    shrink: <e, o> / <o, o>, the part that scales the output. neighbours: correlation of the error
    in a row with that in the next. Both are 0 for independent rounding.
    """
    energy = float((error**2).sum())
    near = float((error[1:] * error[:-1]).sum())
    return {
        "shrink": float((error * output).sum() / (output**2).sum()),
        "neighbours": near / energy if energy else 0.0,
        "relative": float(np.sqrt(energy / (output**2).sum())),
    }
