"""The command line: `cuflash COMMAND`. One entry of `COMMANDS` per command, one line per error.

What is wrong with arguments or input ends in `cuflash: argument: value: rule`, exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from cuflash import terminal
from emulation.report.files import OutputFile
from emulation.report.inputs import InputError
from emulation.report.json_report import versions
from emulation.report.progress import Progress
from emulation.report.text import rms
from emulation.report.work import FORMATS, MAX_SCORES, Work, prepare, said

if TYPE_CHECKING:
    from emulation.contributions import Attribution

WIDE = 108
"""Columns that the table needs with its column of groups."""

SWEEP_ROWS, SWEEP_TILES, SWEEP_SCORES = 256, (32, 64, 128, 256, 512), 4_000_000

SECONDS = {"flash": 1.5e-6, "standard": 0.5e-6}
"""Of a score, with 64 columns and without gradients, on one core."""


class _Parser(argparse.ArgumentParser):
    """argparse with errors in the one form, and no abbreviations for later options to break."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        choice = re.fullmatch(
            r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)", message, re.S
        )
        if choice:
            known = choice[3].replace(chr(39), "")
            raise InputError(f"{choice[1]}: {choice[2] or 'empty'}: must be one of {known}")
        raise InputError(message.removeprefix("argument "))


# -- Types of arguments ----------------------------------------------------------------


def _rule(value: str, rule: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{value or 'empty'}: {rule}")


def _positive(value: str) -> float:
    with contextlib.suppress(ValueError):
        x = float(value)
        if math.isfinite(x) and x > 0:
            return x
    raise _rule(value, "must be a positive finite number")


def _integer(least: int) -> Callable[[str], int]:
    def convert(value: str) -> int:
        if re.fullmatch(r"[0-9]{1,18}", value) and int(value) >= least:
            return int(value)
        raise _rule(value, f"must be an integer >= {least}")

    return convert


def _heads(value: str) -> list[int]:
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", value):
        raise _rule(value, "must be H or H,H,..., integers >= 0")
    heads = [int(h) for h in value.split(",")]
    if len(set(heads)) != len(heads):
        raise _rule(value, "must name each head once")
    return heads


def _window(value: str) -> tuple[int | None, int | None]:
    if not re.fullmatch(r"[0-9]{0,18},[0-9]{0,18}", value):
        raise _rule(value, "must be L,R, integers >= 0 (left empty: unbounded)")
    left, right = (int(side) if side else None for side in value.split(","))
    return left, right


# -- report: arguments -----------------------------------------------------------------


def _add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "input",
        nargs="?",
        metavar="INPUT.npz",
        help="q, k, v of (N, D), (H, N, D) or (B, H, N, D); optionally dout, out (an observed "
        "output), scale, causal. Without it: one bundled real head, causal",
    )
    add(
        "--dtype",
        choices=tuple(FORMATS),
        help="format that q, k and v are rounded to, which the report then says (default: the "
        "file's own, float32 for float64)",
    )
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument(
        "--causal",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the last query sees the last key, each earlier one a key less",
    )
    mask.add_argument(
        "--causal-alignment",
        choices=("bottom-right", "top-left"),
        help="causal, with the diagonal from the given corner",
    )
    add("--window", type=_window, metavar="L,R", help="keys seen left and right of the diagonal")
    add("--softcap", type=_positive, metavar="X", help="scores become X tanh(score / X)")
    add("--scale", type=_positive, metavar="X", help="factor of q k^T (default: 1 / sqrt(D))")
    add(
        "--head",
        type=_heads,
        metavar="H[,H...]",
        help="only these heads, counted over the batch (default: all, or the first where all are "
        f"over {MAX_SCORES / 1e6:.0f} million scores)",
    )
    add(
        "--rows",
        type=_integer(1),
        metavar="N",
        help="only the last N queries, not with top-left (default: all, or as many as are "
        f"{MAX_SCORES / 1e6:.0f} million scores)",
    )
    add(
        "--numerics",
        nargs="+",
        action="extend",
        default=[],
        metavar="FIELD=VALUE",
        help="choices of arithmetic of flash, such as reference=row-max row_sum=unrounded",
    )
    add(
        "--state",
        choices=("float32", "bfloat16", "float16"),
        help="format kept between the steps, of both algorithms with --against (default: float32)",
    )
    add(
        "--algorithm",
        choices=("flash", "standard"),
        default="flash",
        help="what is reported (default: flash)",
    )
    add(
        "--against",
        choices=("flash", "standard"),
        help="report the difference instead: --algorithm minus this one",
    )
    add(
        "--backward",
        action="store_true",
        help="also the gradients, for dout of the file or a normal one",
    )
    add(
        "--seed",
        type=_integer(0),
        metavar="N",
        help="of the normal dout of --backward (default: 0)",
    )
    add("-o", "--output", default="report.html", metavar="FILE", help="HTML (default: report.html)")
    add("--no-html", action="store_true", help="write no HTML")
    add("--json", metavar="FILE", help="also write JSON")


def _numerics(items: Sequence[str]) -> Any:
    """`field=value` items as Numerics, None for none. Raises InputError."""
    import emulation

    if not items:
        return None
    known = [f.name for f in dataclasses.fields(emulation.Numerics)]
    fields: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not value:
            raise InputError(f"--numerics: {item or 'empty'}: must be field=value")
        if name not in known:
            raise InputError(f"--numerics: {name}: must be one of {', '.join(known)}")
        if name in fields:
            raise InputError(f"--numerics: {name}: must be given once")
        fields[name] = value
    try:
        return emulation.Numerics(**fields)  # type: ignore[arg-type]  # it checks the values itself
    except (TypeError, ValueError) as error:
        raise InputError(f"--numerics: {said(error)}") from None


_ARGUMENTS = "q|k|v|dout|observed|algorithm|against|state|numerics|plan|scale|causal|window|softcap"

# -- report: work ----------------------------------------------------------------------


def _attribute(work: Work, args: argparse.Namespace, **more: Any) -> Attribution:
    import emulation

    try:
        return emulation.attribute(
            work.q,
            work.k,
            work.v,
            dout=work.dout,
            algorithm=args.algorithm,
            against=args.against,
            state=args.state or "float32",
            observed=work.observed,
            **work.masks,
            **more,
        )
    except OverflowError as error:
        raise InputError(str(error).replace("; must", ": must")) from None
    except (TypeError, ValueError) as error:
        # Only what names one of our arguments is the user's; the rest are defects, with traceback.
        if re.match(rf"({_ARGUMENTS})\b[^:]*: ", str(error)):
            raise InputError(said(error)) from None
        raise


def _sweep(
    found: Attribution, work: Work, args: argparse.Namespace, bar: Progress, weight: float
) -> list[dict[str, Any]] | None:
    """The last rows again with other tile sizes; None where that has no meaning."""
    tiled = found.plan is not None and "flash" in (args.algorithm, args.against)
    if found.plan is None or not tiled or work.observed is not None or not work.bottom_right:
        return None
    cut = dataclasses.replace(work.last_rows(SWEEP_ROWS), dout=None)
    if cut.cost > SWEEP_SCORES:
        cut = cut.first_head()
    if cut.cost > SWEEP_SCORES:
        return None
    n_k = cut.k.shape[-2]
    points = []
    for tile_n in (t for t in SWEEP_TILES if t <= n_k):
        plan = dataclasses.replace(found.plan, tile_n=tile_n)
        progress = bar.part(weight / len(SWEEP_TILES), f"tiles of {tile_n}", _stages(args))
        one = _attribute(cut, args, plan=plan, progress=progress)
        point = {
            "tiles": -(-n_k // tile_n) if one.tiles is None else int(one.tiles.max()),
            "tile_n": tile_n,
            "error": rms(one.error),
            "groups": {name: float(g.rms) for name, g in one.groups.items()},
        }
        if one.before_cast is not None:
            point["error_before_cast"] = rms(one.before_cast.error)
        points.append(point)
    return points


def _stages(args: argparse.Namespace, backward: bool = False) -> int:
    return (2 if args.against else 1) * (2 if backward else 1)


def _seconds(work: Work, args: argparse.Namespace, extra: float) -> float:
    """Roughly what the work takes."""
    each = sum(SECONDS[a] for a in (args.algorithm, args.against) if a is not None)
    columns: float = max(64, work.q.shape[-1], work.v.shape[-1]) / 64
    return columns * (work.cost * each * (2 if args.backward else 1) + extra * SECONDS["flash"])


def _run_report(args: argparse.Namespace, command: str) -> str:
    """Everything of `cuflash report`; returns the Markdown. Raises InputError."""
    from emulation import report

    if args.input is None and args.numerics and args.numerics[-1].endswith(".npz"):
        # `--numerics a=b INPUT.npz`: argparse gives the list everything that follows it.
        args.input = args.numerics.pop()
    html = None if args.no_html else OutputFile.check("--output", args.output)
    json = None if args.json is None else OutputFile.check("--json", args.json)
    # A NUL cannot be resolved; reading the input will say so.
    named = bool(args.input) and "\0" not in args.input
    taken = [os.path.realpath(args.input)] if named else []
    for file in (f for f in (html, json) if f is not None):
        if file.path in taken and not file.direct:
            other = (
                "INPUT, which is not overwritten" if [file.path] == taken[:named] else "--output"
            )
            raise InputError(f"{file.argument}: {file.path}: must differ from {other}")
        taken.append(file.path)
    if args.numerics and "flash" not in (args.algorithm, args.against):
        raise InputError(f"--numerics: {' '.join(args.numerics)}: must go with flash")
    if args.seed is not None and not args.backward:
        raise InputError(f"--seed: {args.seed}: must go with --backward")
    if args.against == args.algorithm:
        raise InputError(f"--against: {args.against}: must differ from --algorithm")
    if html is not None:
        try:
            from emulation.report import pictures  # noqa: F401
        except ImportError as error:
            raise InputError(f"--output: {args.output}: {error} (or give --no-html)") from None
    numerics = _numerics(args.numerics)
    work = prepare(
        args.input,
        fmt=FORMATS.get(args.dtype),
        masks={
            "scale": args.scale,
            "causal": args.causal_alignment or args.causal,
            "window": args.window,
            "softcap": args.softcap,
        },
        heads=args.head,
        rows=args.rows,
        backward=args.backward,
        seed=args.seed,
    )
    sweeping = html is not None or json is not None
    extra = float(min(work.last_rows(SWEEP_ROWS).cost, SWEEP_SCORES) * len(SWEEP_TILES)) * sweeping
    cost = float(work.cost * _stages(args, args.backward))
    with Progress(cost + extra) as bar:
        bar.announce(_seconds(work, args, extra))
        progress = bar.part(cost, args.algorithm, _stages(args, args.backward))
        found = _attribute(work, args, numerics=numerics, progress=progress)
        found = dataclasses.replace(found, notes=(*work.notes, *found.notes))
        sweep = _sweep(found, work, args, bar, extra) if sweeping else None
    shown = _options(work, args)
    if json is not None:
        data = report.to_json(
            found, source=work.source, command=command, options=shown, sweep=sweep
        )
        json.write(data)
    if html is not None:
        page = report.to_html(
            found, source=work.source, command=command, options=shown, sweep=sweep
        )
        html.write(page)
    written = [name for name, file in ((args.output, html), (args.json, json)) if file is not None]
    if written:
        terminal.tell(f"wrote {', '.join(written)}")
    wide = not sys.stdout.isatty() or shutil.get_terminal_size().columns >= WIDE
    return report.to_markdown(found, source=work.source, options=shown, groups=wide)


def _options(work: Work, args: argparse.Namespace) -> dict[str, Any]:
    window = work.masks["window"]
    sides = None if window is None else ["unbounded" if w is None else w for w in window]
    causal = work.masks["causal"]
    options = {
        "algorithm": args.algorithm,
        "against": args.against,
        "state": args.state,
        "causal": "bottom-right" if causal is True else causal,
        "window": sides,
        "softcap": work.masks["softcap"],
        "scale": work.masks["scale"],
        "heads": args.head,
        "rows": args.rows,
        "numerics": " ".join(args.numerics) or None,
        "seed": work.seed,
    }
    return {name: value for name, value in options.items() if value is not None}


# -- Commands --------------------------------------------------------------------------


class Said(NamedTuple):
    """What a command leaves: Markdown for stdout, and the exit code."""

    markdown: str
    code: int = 0


@dataclass(frozen=True)
class Command:
    """One command: its line of help, its arguments, and what it does."""

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, str], Said]


def _said_report(args: argparse.Namespace, command: str) -> Said:
    return Said(_run_report(args, command))


def _run_doctor(args: argparse.Namespace, command: str) -> Said:
    from cuflash import doctor

    findings = doctor.examine()
    return Said(doctor.to_markdown(findings), 0 if doctor.gpu_usable(findings) else 1)


def _add_claims(parser: argparse.ArgumentParser) -> None:
    from cuflash import claims

    claims.add(parser)


def _said_claims(args: argparse.Namespace, command: str) -> Said:
    from cuflash import claims

    return Said(claims.run(args, command))


def _add_explain(parser: argparse.ArgumentParser) -> None:
    from cuflash import explain

    explain.add(parser, _positive, _window, _integer)


def _said_explain(args: argparse.Namespace, command: str) -> Said:
    from cuflash import explain

    return Said(*explain.run(args, command))


COMMANDS: dict[str, Command] = {
    "report": Command(
        "where the rounding error of attention comes from", _add_report, _said_report
    ),
    "explain": Command(
        "whether an attention output is rounding or a bug, and which", _add_explain, _said_explain
    ),
    "claims": Command(
        "an article's claims about flash and standard attention, measured",
        _add_claims,
        _said_claims,
    ),
    "doctor": Command("what is installed, and what mends the rest", lambda _: None, _run_doctor),
}


def _joined(words: Sequence[str]) -> list[str]:
    """`--window -1,2` as `--window=-1,2`; argparse would take "-1,2" for an unknown option."""
    out: list[str] = []
    for word in words:
        if out and out[-1] in ("--window", "--head") and re.match(r"-[0-9]", word):
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: sys.argv); returns the exit code.

    0: done. 1: `doctor` found no usable GPU. 2: wrong arguments or input, one line on stderr.
    130: interrupted.
    """
    words = _joined(sys.argv[1:] if argv is None else argv)
    try:
        terminal.usable()
        return _run(words)
    except InputError as error:
        terminal.tell(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


def _run(words: Sequence[str]) -> int:
    parser = _Parser(prog="cuflash", description="Attention whose every rounding is explained.")
    version = f"cuflash {versions()['cuflash']}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", parser_class=_Parser)
    for name, command in COMMANDS.items():
        command.add(commands.add_parser(name, help=command.help, description=command.help))
    args, unknown = parser.parse_known_args(words)
    if unknown:
        named = "" if args.command is None else f" {args.command}"
        rule = f"not known, see `cuflash{named} --help`"
        raise InputError(f"arguments: {' '.join(unknown)}: {rule}")
    if args.command is None:
        markdown, code = parser.format_help(), 0
    else:
        markdown, code = COMMANDS[args.command].run(args, shlex.join(["cuflash", *words]))
    with contextlib.suppress(BrokenPipeError):  # the reader left, the files are written
        terminal.write(markdown)
    return code
