"""The benchmark's arms do the same work: what they compare is how."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import update_phase
from tests.benchmarks.arms import middling
from tests.benchmarks.workload import FULL, SMALL, build_model, make_rollout, operations


def test_all_arms_do_the_same_work_on_the_same_rows(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    command = f"--small --device cpu --prompts 3 --budget 300 --padded-groups 3 --repeats 1 --json {file}"
    results = update_phase.main(command.split())
    assert [result["arm"] for result in results] == ["engine", "unshared", "original", "trl_padded"]
    engine = results[0]
    for result in results[1:]:
        assert result["policy_loss"] == pytest.approx(engine["policy_loss"], abs=1e-4)
        assert result["discriminator_loss"] == pytest.approx(engine["discriminator_loss"], abs=1e-4)
        # At a ratio of 1 the losses say nothing of the log-probs
        for name in ("policy_grad_norm", "discriminator_grad_norm", "reference_logp"):
            assert result[name] == pytest.approx(engine[name], rel=1e-3), (result["arm"], name)
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
    assert results[3]["tokens"]["policy"] == 3 * 4 * (max(prompts) + max(map(max, samples)))  # padded to the longest


def test_more_prompts_and_more_samples_keep_the_others() -> None:
    small, more, longer = make_rollout(SMALL, 2, 2), make_rollout(SMALL, 3, 2), make_rollout(SMALL, 2, 4)
    assert [group.prompt_ids for group in more.groups][:2] == [group.prompt_ids for group in small.groups]
    for few, many in zip(small.samples, longer.samples, strict=True):
        assert [sample.ids for sample in many][:2] == [sample.ids for sample in few]


def test_padded_rows_run_on_prompts_whose_pictures_are_like_all() -> None:
    assert middling([9, 2, 4, 1], 2) == [1, 2]  # the mean is 4: first 4, then 2, as 3 is nearer to it than 6.5 or 2.5
    assert middling([5, 6], 3) == [0, 1]
    sizes = [len(group.pictures[0].pixel_values) for group in make_rollout(FULL, 16, 1).groups]
    chosen = [sizes[i] for i in middling(sizes, 2)]
    assert sum(chosen) / 2 == pytest.approx(sum(sizes) / 16, rel=0.1)
    assert sum(n**2 for n in chosen) / 2 == pytest.approx(sum(n**2 for n in sizes) / 16, rel=0.1)


def test_operations_by_hand() -> None:
    model = build_model(SMALL, "cpu")
    # Weights. Of a text layer, width 32, 4 heads and 2 key heads of 8: q and o 2 * 32 * 32, k and v 2 * 32 * 16, MLP
    # 3 * 32 * 64, norms 2 * 32 + 2 * 8 = 9,296; two layers 18,592. Of a vision block: qkv 32 * 96 + 96, projection
    # 32 * 32 + 32, MLP 2 * 32 * 64 + 96, norms 4 * 32 = 8,544; two blocks and the patch embedding, 3 * 2 * 8 * 8 * 32
    # + 32 = 12,320, are 29,408. The merger and DeepStack's are both 128 * 128 + 128 + 128 * 32 + 32 = 20,640, their
    # norms 2 * 32 and 2 * 128: 41,600, a quarter of it a patch.
    text, tower = 2 * 18_592 * (10 + 6), 2 * (29_408 + 41_600 / 4) * 16
    # A prompt of 10 with responses of 4 and 2: 10 * 10 / 2 + 4 * (10 + 2) + 2 * (10 + 1) = 120 pairs
    attention = 4 * 32 * 2 * 120 + 4 * 32 * 2 * 16**2
    head = 2 * 32 * 512 * 6
    assert operations(SMALL, model, [(10, [4, 2], 16)]) == text + tower + attention + head
