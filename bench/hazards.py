"""Judges a log of racecheck: every hazard is a finding but for one kind, in which the tool errs.

    compute-sanitizer --tool racecheck --print-limit 10000 python -m bench.sanitized > racecheck.log
    python -m bench.hazards racecheck.log

Where a warp has read or written shared memory, each lane's accesses come before its fence, that
before __syncwarp, and that before the arrival of lane 0 at the mbarrier which the next warp, or the
next copy, waits for. racecheck follows the arrival of the lane itself, but not that of another lane
of its warp. In pairs of the Hopper backward, told by the instructions at the addresses that the log
names, the later one first (where the log has the order: it does not always):

    UBLKCP.S.G, LDS.64   LSE and delta are loaded into places that consumers have read (kQEmpty,
                         kDOEmpty); reported is each place that is filled again
    LDSM, STSM           above D = 128 dS is read by the warp that sums its rows (kDSFull)

What makes the other loads, cp.async.bulk.tensor, and what products read, it does not see at all.
"""

from __future__ import annotations

import argparse
import functools
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from cuflash.compiler import compile_kernel

#: By kernel, instructions of the later and of the earlier access.
PAIRS = {
    "backward": {("UBLKCP.S.G", "LDS.64")},
    "backward_wide": {("UBLKCP.S.G", "LDS.64"), ("LDSM.16.M88.4", "STSM.16.MT88.4")},
}
SOURCES = {"backward": "sm90/backward.cu", "backward_wide": "sm90/backward_wide.cu"}
KERNEL = re.compile(r"cuflash::sm90::(\w+)<")
ACCESS = re.compile(r"(Write|Read|Atomic) access at (?:void )?(.+)\+0x([0-9a-f]+)")
TOTAL = re.compile(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)")


def name_expression(demangled: str) -> str:
    """A kernel as C++ names the instantiation, without its parameters.

    >>> name_expression("cuflash::f<cuflash::S<cuflash::Fp16, (int)64, (bool)0>, (bool)1>(Params)")
    'cuflash::f<cuflash::S<cuflash::Fp16,64,false>,true>'
    """
    name = re.sub(r"\([^()]*\)$", "", demangled.strip())
    name = name.replace("(bool)0", "false").replace("(bool)1", "true").replace("(int)", "")
    return name.replace(", ", ",")


def disassembler() -> str:
    """nvdisasm, of a toolkit or of a package. Raises FileNotFoundError with what installs it."""
    spec = find_spec("nvidia")
    places = (spec.submodule_search_locations or []) if spec else []
    found = [str(path) for place in places for path in Path(place).glob("cu*/bin/nvdisasm")]
    tool = shutil.which("nvdisasm") or next(iter(found), None)
    if tool is None:
        raise FileNotFoundError("no nvdisasm: python -m pip install nvidia-cuda-nvdisasm")
    return tool


def pairs_of(kernel: str) -> set[tuple[str, str]]:
    """Of PAIRS, those of a kernel (its name in the log)."""
    match = KERNEL.match(name_expression(kernel))
    return set() if match is None else PAIRS.get(match[1], set())


@functools.cache
def instructions(kernel: str) -> dict[int, str]:
    """By address, the opcodes of a kernel of SOURCES (its name in the log); empty for others."""
    name = name_expression(kernel)
    match = KERNEL.match(name)
    if match is None or match[1] not in SOURCES:
        return {}
    compiled = compile_kernel(SOURCES[match[1]], name, "sm_90a")
    text = subprocess.run(
        [disassembler(), "-c", str(compiled.path)], capture_output=True, text=True, check=True
    ).stdout
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)
    return {int(address, 16): opcode for address, opcode in lines}


def judge(lines: Iterable[str]) -> tuple[Counter[str], list[str]]:
    """Pairs that are no findings by kernel, and the findings."""
    allowed: Counter[str] = Counter()
    findings, groups, total, later = [], 0, -1, ("", "")
    for line in lines:
        if summary := TOTAL.search(line):
            total = int(summary[1]) + int(summary[2])
        for _, kernel, address in ACCESS.findall(line):
            opcode = instructions(kernel).get(int(address, 16), "?")
            if "Race reported between" in line:
                groups += 1
                later = (opcode, line)
            elif (later[0], opcode) in pairs_of(kernel):
                allowed[name_expression(kernel)] += 1
            else:
                findings.append(f"{later[1].strip()} [{later[0]}]\n{line.strip()} [{opcode}]")
    if groups != total:
        findings.append(f"{groups} hazards in the log, {total} in its summary")
    return allowed, findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("log", type=Path)
    allowed, findings = judge(parser.parse_args().log.read_text().splitlines())
    print(
        f"racecheck: {len(findings)} findings; beside them {sum(allowed.values())} pairs in "
        f"{len(allowed)} kernels, of lanes for which another one arrives"
    )
    print(*findings[:5], sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
