"""Where rounding happens: every step of every algorithm that may round, its group, and what is
rounded there.

A step names its source; the name is what the report shows. The groups answer "rescale or summation
order?".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One place of rounding: its name, the group it is counted in, and one line that says what is
    rounded.
    """

    name: str
    group: str
    about: str


_TABLE = (
    # forward
    ("QK accumulation", "score", "S = Q K^T in the tensor core: aligned, truncated, summed"),
    ("S rounding", "score", "S rounded to the format of the state"),
    ("score scaling", "score", "scale (times log2 e) as a float, and the multiplication by it"),
    ("softcap", "score", "softcap * tanh(S / softcap)"),
    ("exponent argument", "exponential", "score minus reference, in log2 units"),
    ("exp2", "exponential", "2^x by the special function unit or the polynomial"),
    ("row sum", "summation order", "l: the additions of P along the row"),
    ("PV accumulation", "summation order", "O += P V in the tensor core, tile after tile"),
    ("alpha", "rescale", "alpha = 2^(old reference - new reference)"),
    ("rescale of l", "rescale", "l * alpha"),
    ("rescale of O", "rescale", "O * alpha"),
    ("P rounding", "P rounding", "P rounded to the half format of the product"),
    ("reciprocal", "normalisation", "1 / l"),
    ("final multiply", "normalisation", "O * (1 / l), or P / l"),
    ("output cast", "output cast", "the result rounded to its format"),
    ("LSE", "LSE", "LSE from reference and l; in the backward: all error of the LSE"),
    # backward
    ("LSE scaling", "LSE", "LSE * log2 e"),
    ("P from forward", "P from forward", "the stored P: every error the forward left in it"),
    ("dP accumulation", "dP", "dP = dO V^T in the tensor core"),
    ("dP rounding", "dP", "dP rounded to the format of the state"),
    ("rounded O in delta", "delta", "delta = rowsum(dO * O): what O lost when it was rounded"),
    ("O in delta", "delta", "delta: the error of O before its rounding"),
    ("delta", "delta", "delta: the products and the sum"),
    ("dS", "dS", "P * (dP - delta): the subtraction and the multiplication"),
    ("dS rounding", "dS rounding", "dS rounded to the half format of its products"),
    ("dV accumulation", "summation order", "dV += P^T dO in the tensor core"),
    ("dK accumulation", "summation order", "dK += dS^T Q in the tensor core"),
    ("dQ accumulation", "summation order", "dS K of one key tile in the tensor core"),
    ("dQ order", "summation order", "the key tiles' products added to dQ in fp32"),
    ("dQ centering", "summation order", "the sums of dS's rows, a mean key, and dQ less both"),
    ("gradient scaling", "normalisation", "dQ and dK times scale"),
)  # fmt: skip

#: All sources by name, in the order of a table.
SOURCES: dict[str, Source] = {name: Source(name, group, about) for name, group, about in _TABLE}

#: All groups, in the order of a table.
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(group for _, group, _ in _TABLE))
