"""`cuflash explain`: a verdict on somebody's attention output, from files.

Exit code 0 whatever the verdict; with --fail 1 where an output is another computation; 2 where
arguments or files are wrong.
"""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

import numpy as np

from cuflash.problem import LAYOUTS, swapped
from emulation.explain.case import GRADIENTS, GRADIENTS_OF_ONE
from emulation.explain.verdict import Verdict
from emulation.problem import DTYPES, Array, dtype_name
from emulation.report.arrays import read_array
from emulation.report.files import OutputFile
from emulation.report.inputs import InputError, check_finite, to_format
from emulation.report.progress import Progress
from emulation.report.text import printable
from emulation.report.work import FORMATS, said

_NAMES = "q|k|v|out|lse|dout|grads|dq|dk|dv|dtype|rows|scale|causal|window|softcap"
_GRADIENT_HELP = {
    "dout": "the gradient of out, for which dq, dk and dv are judged; beyond "
    f"{GRADIENTS} scores on some key heads, of at most {GRADIENTS_OF_ONE} scores each",
    **{name: f"{name}, to be judged, too (needs --dout)" for name in ("dq", "dk", "dv")},
}
_EPILOG = (
    "exit code: 0 whatever the verdict; with --fail 1 where --out or --against is another "
    "computation; 2 where arguments or files are wrong"
)
_OUTPUTS = ("out", "lse", "dq", "dk", "dv")


def add(parser: argparse.ArgumentParser, positive: Any, window: Any, integer: Any) -> None:
    """The arguments of the command; the three convert numbers as the other commands do."""
    parser.epilog = _EPILOG
    kinds = ".npy, .npz or .safetensors; FILE:NAME picks one of several arrays"
    for name in "qkv":
        parser.add_argument(f"--{name}", required=True, metavar="FILE", help=f"{name}: {kinds}")
    parser.add_argument("--out", required=True, metavar="FILE", help="the output to be explained")
    parser.add_argument("--lse", metavar="FILE", help="its log-sum-exp (natural logarithm)")
    parser.add_argument("--against", metavar="FILE", help="another output for the same inputs")
    for name in ("dout", "dq", "dk", "dv"):
        parser.add_argument(f"--{name}", metavar="FILE", help=_GRADIENT_HELP[name])
    parser.add_argument(
        "--dtype",
        choices=tuple(FORMATS),
        help="format that the kernel took q, k and v in (default: theirs; of float32 files that "
        "hold nothing but bfloat16 or float16 values, that one, which the verdict says)",
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="bhnd",
        help="of all arrays but lse, which is (B, H, N); bnhd takes 3-D ones as (N, H, D)",
    )
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
    parser.add_argument(
        "--fail", action="store_true", help="exit code 1 if an output is another computation"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="HTML")
    parser.add_argument("--json", metavar="FILE", help="JSON")
    parser.add_argument("--markdown", metavar="FILE", help="what is printed, as a file")


def run(args: argparse.Namespace, command: str) -> tuple[str, int]:
    """Everything of the command; returns the Markdown and the exit code. Raises InputError."""
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
        wrong = not verdict.is_rounding
        more: list[str] = []
        if "against" in arrays:
            other = _explain(args, arrays, "against", bar.part(1.0, "against"))
            more = difference(arrays, verdict, other)
            wrong = wrong or not other.is_rounding
    source = ", ".join(os.path.basename(p) for p in given.values() if p is not None)
    options = _options(args, arrays, verdict)
    shown: dict[str, Any] = {"source": source, "options": options, "more": more}
    markdown = verdict.to_markdown(**shown)
    if "json" in files:
        files["json"].write(verdict.to_json(command=command, **shown))
    if "output" in files:
        files["output"].write(verdict.to_html(command=command, **shown))
    if "markdown" in files:
        files["markdown"].write(markdown)
    return markdown, int(args.fail and wrong)


def _arrays(args: argparse.Namespace) -> dict[str, Array]:
    """Every array that was named, checked, heads before rows."""
    graded = any(getattr(args, n) is not None for n in ("dq", "dk", "dv"))
    if args.dout is None and graded:
        raise InputError("--dout: missing: must come with --dq, --dk and --dv")
    if args.dout is not None and not graded:
        raise InputError(f"--dout: {printable(args.dout)}: must come with --dq, --dk or --dv")
    found = {}
    for name in ("q", "k", "v", "out", "against", "lse", "dout", "dq", "dk", "dv"):
        path = getattr(args, name)
        if path is not None:
            axes = (1, 3) if name == "lse" else (2, 4)
            x = read_array(f"--{name}", path, "out" if name == "against" else name, axes)
            found[name] = x if name == "lse" else swapped(x, args.layout)
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
            dtype=args.dtype,
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
    said_of = []
    known = np.isfinite(a) & np.isfinite(b)
    for name, x in (("--out", a), ("--against", b)):
        bad = np.argwhere(~np.isfinite(x))
        if len(bad):
            at = tuple(int(i) for i in bad[0])
            said_of.append(
                f"{name} holds {len(bad)} of {x.size} elements that are not finite, the first "
                f"{x[at]} at {at}."
            )
    if known.any():
        # Where one is not finite there is no difference to speak of.
        gap = np.abs(np.where(known, a, 0.0) - np.where(known, b, 0.0))
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(gap)), gap.shape))
        rest = "" if known.all() else ", where both are finite,"
        said_of.append(
            f"The two outputs are equal in {100 * float(np.mean(a == b)):.3g} % of the elements; "
            f"they differ most{rest} at {at}, by {gap[at]:.3g} "
            f"(rms {float(np.sqrt(np.mean(gap[known] ** 2))):.3g})."
        )
    kinds = [v.is_rounding for v in (first, other)]
    if all(kinds):
        said_of.append("Both are within what rounding allows: neither is the exact one.")
    elif any(kinds):
        right, wrong = ("--out", "--against") if kinds[0] else ("--against", "--out")
        said_of.append(f"{right} is rounding; {wrong} is another computation.")
    else:
        said_of.append("Both are another computation than the one that was asked for.")
    ours, theirs = (f"{v.kind}{f' ({v.named})' if v.named else ''}" for v in (first, other))
    said_of.append(f"--out: {ours}; --against: {theirs}.")
    formats = [v.facts["dtype"] for v in (first, other)]
    if formats[0] != formats[1]:
        said_of.append(f"--out was judged as {formats[0]}, --against as {formats[1]}.")
    return said_of


def _options(
    args: argparse.Namespace, arrays: dict[str, Array], verdict: Verdict
) -> dict[str, Any]:
    options = {
        "dtype": verdict.facts["dtype"],
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
