"""The report for machines: strict JSON, statistics of every source and group, no whole tensors."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from emulation.report import text

if TYPE_CHECKING:
    from emulation.contributions import Attribution, Contribution

SCHEMA = "cuflash.attribution/1"
"""Changes when a reader of the old form would misread the new one."""


def versions() -> dict[str, str]:
    """Versions of what computed the figures; "unknown" for a package that runs uninstalled."""
    found = {"python": platform.python_version()}
    for name in ("cuflash", "numpy", "ml_dtypes"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def plain(value: Any) -> Any:
    """Data that strict JSON can say: NaN and infinities become null, NumPy scalars numbers.

    >>> plain({"a": float("nan"), 2: (1, np.float32(0.5))})
    {'a': None, '2': [1, 0.5]}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Sequence | np.ndarray):
        return [plain(v) for v in value]
    return str(value)


def _contribution(c: Contribution) -> dict[str, Any]:
    return {
        "group": c.group,
        "about": c.about,
        "rms": c.rms,
        "max": c.max,
        "mean": c.mean,
        "share": c.share,
    }


def _summary(a: Attribution) -> dict[str, Any]:
    error, rest = text.Statistics.of(a.error), text.Statistics.of(a.residual)
    tiles = a.tiles
    data: dict[str, Any] = {
        "shape": list(a.error.shape),
        "error": {
            "rms": error.rms,
            "max": error.max,
            "mean": error.mean,
            "mean_stderr": error.stderr,
        },
        "sources": {c.name: _contribution(c) for c in a.sources.values()},
        "groups": {c.name: _contribution(c) for c in a.groups.values()},
        "residual": {
            "rms": rest.rms,
            "max": rest.max,
            "mean": rest.mean,
            "share": text.inner_share(a.residual, a.error),
            "norm_ratio": a.residual_share,
        },
        "oracle_radius": a.oracle_radius,
        "notes": list(a.notes),
    }
    if tiles is not None and tiles.size:
        data["tiles"] = {"min": int(tiles.min()), "max": int(tiles.max())}
    data["before_cast"] = None if a.before_cast is None else _summary(a.before_cast)
    return data


def to_json(
    attribution: Attribution,
    *,
    source: str | None = None,
    command: str | None = None,
    options: Mapping[str, Any] | None = None,
    sweep: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Strict JSON (RFC 8259), indented; the same arguments give the same bytes.

    `outputs` holds one summary per output, the main one first; in each, `share` is <c, e> / <e, e>
    and those of `sources` and `residual` sum to 1. `residual.norm_ratio` is |residual| / |error|.
    """
    data = {
        "schema": SCHEMA,
        "algorithm": attribution.algorithm,
        "dtype": attribution.dtype,
        "output": attribution.output,
        "verdict": attribution.verdict(),
        "source": source,
        "command": command,
        "options": dict(options or {}),
        "versions": versions(),
        "plan": text.plan_of(attribution) or None,
        "outputs": {name: _summary(part) for name, part in text.parts_of(attribution).items()},
        "tile_sweep": None if sweep is None else list(sweep),
    }
    return json.dumps(plain(data), indent=1, allow_nan=False, ensure_ascii=True) + "\n"
