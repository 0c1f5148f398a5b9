"""How much is measured, with what, and where: the one argument of every claim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

T = TypeVar("T")

Size = Literal["tiny", "quick", "full"]


@dataclass(frozen=True)
class Settings:
    """What to measure; none of it but `size`, `gpu`, `data` and `kernels` changes a figure.

    Raises ValueError for an unknown size and for a GPU without kernels.

    >>> Settings("tiny").pick(tiny=1, quick=2, full=3)
    1
    """

    #: "tiny": seconds, for tests. "quick": minutes on two cores. "full": the published figures.
    size: Size = "quick"
    #: Also run what needs a GPU and CuPy.
    gpu: bool = False
    #: A folder of captures (.npz with q, k, v, scale, causal) beside the bundled one.
    data: str | None = None
    #: Module that offers `attention`, `attention_vjp` and `plan` on arrays, and NAME.torch for
    #: PyTorch. A name, because tasks run in other processes, and because this package stands below
    #: the kernels and cannot import them.
    kernels: str | None = None
    #: Processes; None is one per core.
    workers: int | None = None
    #: Address of a Dask scheduler whose workers run the tasks instead.
    dask: str | None = None
    #: Folder of finished tasks; None keeps nothing, so that nothing can be resumed.
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.size not in get_args(Size):
            raise ValueError(f"size: got {self.size!r}, must be one of {', '.join(get_args(Size))}")
        if self.gpu and self.kernels is None:
            raise ValueError("kernels: None, must name a module when gpu is True")

    def pick(self, *, tiny: T, quick: T, full: T) -> T:
        """The value for this size."""
        return {"tiny": tiny, "quick": quick, "full": full}[self.size]
