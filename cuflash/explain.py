"""`cuflash explain`: a verdict on somebody's attention output, from files."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

import numpy as np

from emulation.explain.verdict import Verdict
from emulation.problem import DTYPES, Array, dtype_name
from emulation.report.arrays import read_array
from emulation.report.files import OutputFile
from emulation.report.inputs import InputError, check_finite, to_format
from emulation.report.progress import Progress
from emulation.report.work import FORMATS, said

_NAMES = "q|k|v|out|lse|dout|grads|dq|dk|dv|rows|scale|causal|window|softcap|plan"
_OUTPUTS = ("out", "lse", "dq", "dk", "dv")


def add(parser: argparse.ArgumentParser, positive: Any, window: Any, integer: Any) -> None:
    """The arguments of the command; the three convert numbers as the other commands do."""
    kinds = ".npy, .npz or .safetensors; FILE:NAME picks one of several arrays"
    for name in "qkv":
        parser.add_argument(f"--{name}", required=True, metavar="FILE", help=f"{name}: {kinds}")
    parser.add_argument("--out", required=True, metavar="FILE", help="the output to be explained")
    parser.add_argument("--lse", metavar="FILE", help="its log-sum-exp (natural logarithm)")
    parser.add_argument("--against", metavar="FILE", help="another output for the same inputs")
    for name in ("dout", "dq", "dk", "dv"):
        parser.add_argument(f"--{name}", metavar="FILE", help=f"{name}, for the gradients")
    parser.add_argument(
        "--dtype",
        choices=tuple(FORMATS),
        help="format that the kernel took q, k and v in (default: theirs)",
    )
    parser.add_argument("--layout", choices=("bhnd", "bnhd"), default="bhnd", help="of all arrays")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", help="the last query sees the last key")
    mask.add_argument("--causal-alignment", choices=("bottom-right", "top-left"))
    parser.add_argument("--window", type=window, metavar="L,R", help="keys seen left and right")
    parser.add_argument("--softcap", type=positive, metavar="X")
    parser.add_argument("--scale", type=positive, metavar="X", help="default: 1 / sqrt(D)")
    parser.add_argument(
        "--rows", type=integer(1), metavar="N", help="queries that get derived bounds"
    )
    parser.add_argument(
        "--search", action="store_true", help="also search for an unknown kernel's arithmetic"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="HTML")
    parser.add_argument("--json", metavar="FILE", help="JSON")
    parser.add_argument("--markdown", metavar="FILE", help="what is printed, as a file")


def run(args: argparse.Namespace, command: str) -> str:
    """Everything of the command; returns the Markdown. Raises InputError."""
    files = {
        name: OutputFile.check(f"--{name}", path)
        for name, path in (
            ("output", args.output),
            ("json", args.json),
            ("markdown", args.markdown),
        )
        if path is not None
    }
    given = {n: getattr(args, n) for n in ("q", "k", "v", *_OUTPUTS, "dout", "against")}
    taken = {
        os.path.realpath(p.split(":")[0]) for p in given.values() if p is not None and "\0" not in p
    }
    for name, file in files.items():
        if file.path in taken and not file.direct:
            raise InputError(f"--{name}: {file.path}: must differ from every other file")
        taken.add(file.path)
    if args.output is not None:
        try:
            from emulation.report import pictures  # noqa: F401
        except ImportError as error:
            raise InputError(f"--output: {args.output}: {error}") from None
    arrays = _arrays(args)
    with Progress(2.0 if "against" in arrays else 1.0) as bar:
        verdict = _explain(args, arrays, "out", bar.part(1.0, "explain"))
        more: list[str] = []
        if "against" in arrays:
            other = _explain(args, arrays, "against", bar.part(1.0, "against"))
            more = difference(arrays, verdict, other)
    source = ", ".join(os.path.basename(p) for p in given.values() if p is not None)
    options = _options(args, arrays)
    shown: dict[str, Any] = {"source": source, "options": options, "more": more}
    markdown = verdict.to_markdown(**shown)
    if "json" in files:
        files["json"].write(verdict.to_json(command=command, **shown))
    if "output" in files:
        files["output"].write(verdict.to_html(command=command, **shown))
    if "markdown" in files:
        files["markdown"].write(markdown)
    return markdown


def _arrays(args: argparse.Namespace) -> dict[str, Array]:
    """Every array that was named, checked, heads before rows."""
    if args.dout is None and any(getattr(args, n) is not None for n in ("dq", "dk", "dv")):
        raise InputError("--dout: missing: must come with --dq, --dk and --dv")
    found = {}
    for name in ("q", "k", "v", "out", "against", "lse", "dout", "dq", "dk", "dv"):
        path = getattr(args, name)
        if path is not None:
            axes = (1, 3) if name == "lse" else (2, 4)
            x = read_array(f"--{name}", path, "out" if name == "against" else name, axes)
            swap = args.layout == "bnhd" and x.ndim == axes[1]
            found[name] = x.swapaxes(1, 2) if swap else x
    fmt = FORMATS.get(args.dtype) if args.dtype else dtype_name(found["q"].dtype)
    for name in ("q", "k", "v"):
        check_finite(f"--{name}", found[name])
        stored = dtype_name(found[name].dtype)
        if args.dtype is None and (stored != fmt or stored not in DTYPES):
            must = (
                f"must be {fmt} like q" if stored != fmt else f"must be one of {', '.join(DTYPES)}"
            )
            raise InputError(f"--{name}: dtype {stored}: {must} (or give --dtype)")
        found[name] = to_format(f"--{name}", found[name], str(fmt))
    if "dout" in found:
        check_finite("--dout", found["dout"])
        found["dout"] = to_format("--dout", found["dout"], str(fmt))
    return found


def _explain(
    args: argparse.Namespace, arrays: dict[str, Array], name: str, progress: Any
) -> Verdict:
    import emulation

    alone = name == "against"
    grads = {n: arrays[n] for n in ("dq", "dk", "dv") if n in arrays and not alone}
    try:
        return emulation.explain(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            arrays[name],
            lse=None if alone else arrays.get("lse"),
            grads=grads or None,
            dout=arrays.get("dout") if grads else None,
            scale=args.scale,
            causal=args.causal_alignment or args.causal,
            window=args.window,
            softcap=args.softcap,
            unknown=args.search,
            rows=args.rows,
            progress=progress,
        )
    except (TypeError, ValueError) as error:
        # Only what names one of our arguments is the user's; the rest are defects, with traceback.
        if re.match(rf"({_NAMES})\b[^:]*: ", str(error)):
            told = said(error)
            raise InputError(
                f"--{name}{told[3:]}" if told.startswith("out:") else f"--{told}"
            ) from None
        raise


def difference(arrays: dict[str, Array], first: Verdict, other: Verdict) -> list[str]:
    """What is to be said of two outputs of the same inputs."""
    a, b = (arrays[n].astype(np.float64) for n in ("out", "against"))
    if a.shape != b.shape:
        raise InputError(f"--against: shape {b.shape}: must be {a.shape} like --out")
    gap = np.abs(a - b)
    with np.errstate(all="ignore"):
        at = tuple(
            int(i)
            for i in np.unravel_index(int(np.argmax(np.nan_to_num(gap, nan=np.inf))), gap.shape)
        )
    share = float(np.mean(a == b))
    said_of = [
        f"The two outputs are equal in {100 * share:.3g} % of the elements; they differ most at "
        f"{at}, by {gap[at]:.3g} (rms {float(np.sqrt(np.mean(np.nan_to_num(gap) ** 2))):.3g})."
    ]
    kinds = [v.is_rounding for v in (first, other)]
    if all(kinds):
        said_of.append("Both are within what rounding allows: neither is the exact one.")
    elif any(kinds):
        good, bad = ("--out", "--against") if kinds[0] else ("--against", "--out")
        said_of.append(f"{good} is rounding; {bad} is another computation.")
    else:
        said_of.append("Both are another computation than the one that was asked for.")
    ours, theirs = (f"{v.kind}{f' ({v.named})' if v.named else ''}" for v in (first, other))
    said_of.append(f"--out: {ours}; --against: {theirs}.")
    return said_of


def _options(args: argparse.Namespace, arrays: dict[str, Array]) -> dict[str, Any]:
    options = {
        "dtype": dtype_name(arrays["q"].dtype),
        "shapes": [" x ".join(map(str, arrays[n].shape)) for n in ("q", "k", "v")],
        "causal": args.causal_alignment or ("bottom-right" if args.causal else False),
        "window": None if args.window is None else [
            "unbounded" if w is None else w for w in args.window
        ],
        "softcap": args.softcap,
        "scale": args.scale,
        "layout": args.layout,
        "rows": args.rows,
    }  # fmt: skip
    return {name: value for name, value in options.items() if value is not None}
