"""float32 operands on a tensor core that multiplies bfloat16: three terms an operand, six products.

x = high + middle + low, each rounded to bfloat16: 24 bits, in float32's own exponent range. Of the
nine products of terms the six largest are taken, smallest first, through one chain of accumulators:
what the accumulator cuts off while it is small costs little. Left out are products below 2^-23 of
the whole (on average 2^-27, of either sign). An infinity acts as NaN: high is cut to the largest
bfloat16, the rest is infinite and so is middle, and low is Inf - Inf. Idea: Henry, Tang and
Heinecke, ARITH 2019.
"""

from __future__ import annotations

from typing import Any

from emulation import rounding, tensor_core
from emulation.formats import BFLOAT16

#: Terms of a and of b in the order of their products: 0 high, 1 middle, 2 low.
PRODUCTS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))


def terms(x: Any) -> tuple[Any, Any, Any]:
    """The three terms of a float32 array, as float32 arrays that hold bfloat16 values.

    Their sum is x, exactly, from 2^-110 on; below, bfloat16's subnormals leave up to 2^-134. What
    would round to infinity is cut to the largest bfloat16 instead, so that the other terms can
    make up for it. NaN and infinities have a NaN among their terms.

    >>> import numpy as np
    >>> [float(t[0]) for t in terms(np.float32([1 + 2.0**-9 + 2.0**-18 + 2.0**-23]))]
    [1.0, 0.001953125, 3.933906555175781e-06]
    """
    xp = rounding.namespace(x)
    top = xp.float32(BFLOAT16.max)
    # Comparisons move no bits: kernels of other array modules may flush subnormals in a minimum.
    high = rounding.cast(xp.where(x > top, top, xp.where(x < -top, -top, x)), BFLOAT16)
    rest = rounding.sub(x, high)
    middle = rounding.cast(rest, BFLOAT16)
    return high, middle, rounding.cast(rounding.sub(rest, middle), BFLOAT16)


def dot(a: Any, b: Any, c: Any = None, *, arch: str = "sm90", step: int | None = None) -> Any:
    """c + a b^T of float32 arrays a (M, K), b (N, K), c (M, N) or None, by six products of terms,
    each over all of K in ascending steps, one accumulator through all of them.

    An element whose row of a or of b holds NaN or an infinity is NaN.

    >>> import numpy as np
    >>> x = np.float32([[1 + 2.0**-12]])
    >>> float(dot(x, x)[0, 0]) == 1 + 2.0**-11
    True
    """
    of_a, of_b = terms(a), terms(b)
    d = c
    for i, j in PRODUCTS:
        d = tensor_core.mma(of_a[i], of_b[j], d, arch=arch, fmt=BFLOAT16.name, step=step)
    return d
