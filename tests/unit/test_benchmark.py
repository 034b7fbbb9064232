"""The benchmark's arms do the same work: what they compare is how."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import update_phase
from tests.benchmarks.workload import SMALL, make_rollout


def test_all_arms_compute_the_same_losses_on_the_same_rows(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    command = f"--small --device cpu --prompts 3 --budget 300 --padded-groups 3 --repeats 1 --json {file}"
    results = update_phase.main(command.split())
    assert [result["arm"] for result in results] == ["engine", "unshared", "original", "trl_padded"]
    engine = results[0]
    for result in results[1:]:
        assert result["policy_loss"] == pytest.approx(engine["policy_loss"], abs=1e-4)
        assert result["discriminator_loss"] == pytest.approx(engine["discriminator_loss"], abs=1e-4)
    assert len({round(result["discriminator_loss"], 3) for result in results}) == 1
    assert abs(engine["discriminator_loss"] - 0.6931) > 1e-3  # scores that are all equal would prove nothing
    assert [json.loads(line)["arm"] for line in file.read_text().splitlines()] == [r["arm"] for r in results]

    # By hand: a prompt once per group, or once per sequence
    rollout = make_rollout(SMALL, 3, 4)
    prompts = [len(group.prompt_ids) for group in rollout.groups]
    samples = [[len(sample.ids) for sample in row] for row in rollout.samples]
    unshared = sum(4 * prompt + sum(lengths) for prompt, lengths in zip(prompts, samples, strict=True))
    assert results[1]["tokens"]["policy"] == unshared
    assert engine["tokens"]["policy"] < 0.8 * unshared
    teachers = sum(len(group.teacher_ids) for group in rollout.groups)
    assert results[2]["tokens"]["discriminator"] == 2 * 4 * sum(prompts) + sum(map(sum, samples)) + 4 * teachers


def test_more_prompts_and_more_samples_keep_the_others() -> None:
    small, more, longer = make_rollout(SMALL, 2, 2), make_rollout(SMALL, 3, 2), make_rollout(SMALL, 2, 4)
    assert [group.prompt_ids for group in more.groups][:2] == [group.prompt_ids for group in small.groups]
    for few, many in zip(small.samples, longer.samples, strict=True):
        assert [sample.ids for sample in many][:2] == [sample.ids for sample in few]
