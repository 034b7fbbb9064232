"""The command `trl-gad`: what can be known before a run.

trl-gad validate --config FILE.yaml     reads every row as a run would and prints what it found
trl-gad env                             versions and what was found on this machine, to paste into an issue
"""

import platform
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import AutoProcessor
from trl import ModelConfig, TrlParser  # type: ignore[attr-defined]

from trl_gad.attention import what_attends
from trl_gad.config import GADConfig
from trl_gad.data import RecipeArguments, check_dataset, load_rows
from trl_gad.kernels import is_liger_available
from trl_gad.rows import RowReader


# Beside what `pyproject.toml` requires
OPTIONAL = ("vllm", "liger-kernel", "deepspeed", "flash-attn")


def validate(argv: list[str]) -> int:
    """The checks of a trainer's start, without a model: its processor is enough. 1 where a run would not start."""
    arguments: list[Any] = [RecipeArguments, GADConfig, ModelConfig]
    parser = TrlParser(arguments, prog="trl-gad validate")
    given, args, model = parser.parse_args_and_config(argv)
    if model.model_name_or_path is None:
        raise ValueError("`model_name_or_path` says whose processor reads the rows. Set it.")
    processor = AutoProcessor.from_pretrained(
        model.model_name_or_path, revision=model.model_revision, trust_remote_code=args.trust_remote_code
    )
    try:
        report = check_dataset(
            load_rows(given.dataset, given.dataset_split),
            RowReader.of(processor, args),
            bad_rows=args.bad_rows,
            num_workers=args.dataloader_num_workers,
        )
        sys.stdout.write(f"{report}\n")
        report.check_budget(args)
    except ValueError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


def env() -> str:
    """Versions, bounds they are outside of, and the back ends that a run would use."""
    lines = [f"trl-gad {version('trl-gad')}, Python {platform.python_version()}, {platform.system()}"]
    bounds = {r.name: r for r in map(Requirement, requires("trl-gad") or []) if r.marker is None}
    for name in (*bounds, *OPTIONAL):
        try:
            found = version(name)
        except PackageNotFoundError:
            lines.append(f"{name}: not installed")
            continue
        specifier = bounds[name].specifier if name in bounds else None
        outside = specifier is not None and not specifier.contains(Version(found).base_version, prereleases=True)
        lines.append(f"{name}: {found}" + f" (tested: {specifier})" * outside)
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(i)
            lines.append(f"GPU {i}: {card.name}, {card.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
        lines.append(f"attention in bfloat16: {what_attends(torch.device('cuda', 0), torch.bfloat16, 128)}")
        lines.append(f"fused kernels: {'liger-kernel' if is_liger_available() else 'none, install trl-gad[liger]'}")
    else:
        lines += ["GPU: none", f"attention: {what_attends(torch.device('cpu'), torch.float32, 128)}"]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command's entry point: 0, or 1 where something is wrong."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command == "validate":
        return validate(rest)
    if command == "env" and not rest:
        sys.stdout.write(env() + "\n")
        return 0
    sys.stdout.write(f"{__doc__}\n")
    return 0 if command in ("-h", "--help") else 1


if __name__ == "__main__":
    sys.exit(main())
