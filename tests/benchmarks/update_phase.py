"""The update phase, side by side: `python -m tests.benchmarks.update_phase --help`.

Reference, policy and discriminator with both optimizer steps, float32 master weights, bf16 compute on a GPU. The arms run
one after the other on the same tensors; seconds are the median of the repeats after a warm-up.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

from tests.benchmarks.arms import ARMS, FIGURES, Bench
from tests.benchmarks.workload import FULL, SMALL, make_rollout, operations
from trl_gad import kernels


PHASES = ("pictures", "old_logps", "reference", "values", "discriminator", "policy", "optimizers")
SWEEP = ((16, 4), (16, 8), (32, 4))  # prompts, samples a prompt


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a tiny model and short rows: seconds on a CPU")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--budget", type=int, default=12288, help="max_tokens_per_micro_batch")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    parser.add_argument("--padded-groups", type=int, default=2, help="prompts that trl_padded runs; scaled to all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sweep", action="store_true", help="the engine with more samples and with more prompts")
    parser.add_argument("--profile", action="store_true", help="kernels of one update of the engine")
    parser.add_argument("--plain-kernels", action="store_true", help="as if liger-kernel were not installed")
    parser.add_argument("--json", help="append a line per arm to this file")
    args = parser.parse_args(argv)
    if args.profile and args.device != "cuda":
        parser.error("--profile shows CUDA kernels: it needs --device cuda")
    return args


def measure(bench: Bench, arm: str, rollout: Any, repeats: int) -> dict[str, Any]:
    """The run with the median time; its losses and norms are those of the first run."""
    if arm == "trl_padded":
        repeats = 1  # a minute or more
    first = bench.run(arm, rollout)
    results = sorted((bench.run(arm, rollout) for _ in range(repeats)), key=lambda result: result["total_s"])
    middle = results[(len(results) - 1) // 2]
    middle |= {name: first[name] for name in FIGURES}
    middle["spread_s"] = results[-1]["total_s"] - results[0]["total_s"]
    return middle


def matrix_rate(device: str) -> float:
    """Operations a second of a large bf16 matrix product on this card; 0 on a CPU."""
    if device != "cuda":
        return 0.0
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(12):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * 8192**3 / statistics.median(seconds[2:])


def add_rates(result: dict[str, Any], bench: Bench, rollout: Any, rate: float) -> None:
    """Packed tokens a second of the policy's forward and backward, and its share of the matrix rate."""
    if result["arm"] == "trl_padded":
        return
    policy_s = result["seconds"]["policy"]
    result["policy_tokens_per_s"] = result["tokens"]["policy"] / policy_s
    rows = [
        (len(g.prompt_ids), [len(s.ids) for s in row], sum(len(p.pixel_values) for p in g.pictures))
        for g, row in zip(rollout.groups, rollout.samples, strict=True)
    ]
    if result["arm"] != "engine":
        rows = [(prompt, [length], patches) for prompt, lengths, patches in rows for length in lengths]
    if rate:
        done = 3 * operations(bench.scale, bench.trainer.policy, rows)
        result["policy_share_of_matrix_rate"] = done / policy_s / rate


def line(result: dict[str, Any], engine_s: float | None) -> str:
    cells = [f"{result['arm']:<11}", f"{result['prompts']}x{result['generations']:<3}", f"{result['total_s']:8.2f}"]
    cells += [f"{result['seconds'].get(phase, 0.0):8.2f}" for phase in PHASES]
    cells += [f"{result['tokens'].get('policy', 0):8}", f"{result['tokens'].get('discriminator', 0):8}"]
    cells += [f"{result.get('policy_tokens_per_s', 0):8.0f}", f"{result.get('policy_share_of_matrix_rate', 0):6.0%}"]
    cells += [f"{result['peak_gib']:6.1f}", f"{result['total_s'] / engine_s:6.1f}x" if engine_s else ""]
    return " ".join(cells) + (f"  from {result['measured_share']:.0%} of the rows" * (result["measured_share"] < 1))


def profile(bench: Bench, rollout: Any) -> str:
    """Kernels of one update of the engine by their time, and the share of the time in which none ran."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        total_s = bench.run("engine", rollout)["total_s"]
    # Only kernels and copies: the operators that launched them, and spans such as an optimizer's step, have the same
    # time once more
    events = [e for e in profiler.key_averages() if e.device_type.name == "CUDA" and not e.is_user_annotation]
    events.sort(key=lambda event: event.self_device_time_total, reverse=True)
    busy_s = sum(event.self_device_time_total for event in events) / 1e6
    lines = [f"{'seconds':>8} {'share':>6} {'calls':>7}  kernel"]
    for event in events[:25]:
        seconds = event.self_device_time_total / 1e6
        lines.append(f"{seconds:8.3f} {seconds / total_s:6.1%} {event.count:7}  {event.key[:100]}")
    # Kernels side by side on several streams would count twice; the engine uses one
    lines.append(f"kernels {busy_s:.2f} s of {total_s:.2f} s, the card is idle for {1 - busy_s / total_s:.0%}")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = parse(argv)
    scale = SMALL if args.small else FULL
    if args.plain_kernels:
        kernels.is_liger_available = lambda: False
    rate = matrix_rate(args.device)
    write = sys.stdout.write
    write(f"torch {torch.__version__}, {args.device}, budget {args.budget}, checkpointing {args.checkpointing}, ")
    write(f"matrix rate {rate / 1e12:.0f} TFLOP/s\n")
    write("arm         rows     total " + " ".join(f"{phase[:8]:>8}" for phase in PHASES))
    write("  pol.tok    D.tok   pol.t/s  rate    GiB  to engine\n")
    results: list[dict[str, Any]] = []
    # One for all arms: the same three models
    bench = Bench(scale, args.device, args.budget, args.generations, args.checkpointing, args.padded_groups)
    work = [(arm, args.prompts, args.generations) for arm in args.arms]
    work += [("engine", *size) for size in SWEEP if args.sweep and ("engine", *size) not in work]
    for arm, num_prompts, num_generations in work:
        rollout = make_rollout(scale, num_prompts, num_generations)
        bench.trainer.num_generations = num_generations
        result = measure(bench, arm, rollout, args.repeats)
        result |= dict(prompts=num_prompts, generations=num_generations, matrix_rate=rate)
        add_rates(result, bench, rollout, rate)
        results.append(result)
        engine = [r["total_s"] for r in results if r["arm"] == "engine"]
        write(line(result, engine[0] if engine else None) + "\n")
        sys.stdout.flush()
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(result) + "\n")
    for attention in dict.fromkeys(result["attention"] for result in results):
        arms = dict.fromkeys(result["arm"] for result in results if result["attention"] == attention)
        write(f"attention of {', '.join(arms)}: {attention}\n")
    if args.profile:
        bench.trainer.num_generations = args.generations  # a sweep has changed it
        write(profile(bench, make_rollout(scale, args.prompts, args.generations)))
    return results


if __name__ == "__main__":
    main()
