from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_gad.planner import MicroBatch, _Sizes, check_budget, count_tokens, plan, share_out


Groups = list[tuple[int, list[int]]]
GROUPS = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 20), max_size=9)), max_size=12)
OPTIONS = st.fixed_dictionaries(
    {"num_repeated": st.integers(0, 2), "share_prompt": st.booleans(), "min_micro_batches": st.integers(1, 20)}
)


def smallest_budget(groups: Groups, num_repeated: int, share_prompt: bool) -> int:
    """The largest of prompt + repeated + one response, counted here by hand."""
    needed = [1]
    for prompt, lengths in groups:
        if not lengths:
            continue  # left out by the planner
        for response in lengths[num_repeated:] or [None]:
            members = lengths[:num_repeated] + ([response] if response else [])
            shared = prompt - 1 + sum(length + 1 for length in members)
            needed.append(shared if share_prompt else sum(prompt + length for length in members))
    return max(needed)


def parts_of(micro_batches: list[MicroBatch]) -> list[list[tuple[int, list[int]]]]:
    return [micro_batch.parts for micro_batch in micro_batches]


@given(groups=GROUPS, options=OPTIONS, slack=st.integers(0, 60))
def test_nothing_is_lost_and_the_budget_holds(groups: Groups, options: dict, slack: int) -> None:
    num_repeated, share_prompt = options["num_repeated"], options["share_prompt"]
    budget = smallest_budget(groups, num_repeated, share_prompt) + slack
    micro_batches = plan(groups, budget, **options)

    seen, num_parts = Counter(), Counter()
    for micro_batch in micro_batches:
        assert len(micro_batch) > 0
        of_groups = [group for group, _ in micro_batch]
        assert of_groups == sorted(set(of_groups)), "the order of the groups, each once"
        for group, responses in micro_batch:
            assert responses == sorted(set(responses))
            seen.update((group, response) for response in responses)
            num_parts[group] += 1
        tokens = sum(
            count_tokens(groups[group][0], [groups[group][1][i] for i in responses], share_prompt)
            for group, responses in micro_batch
        )
        assert tokens == micro_batch.num_tokens <= budget
    assert seen == {
        (group, response): num_parts[group] if response < num_repeated else 1
        for group, (_, lengths) in enumerate(groups)
        for response in range(len(lengths))
    }
    assert plan(groups, budget, **options) == micro_batches

    # As many parts as asked for, or one per response that is not repeated.
    most = sum(max(len(lengths) - num_repeated, 1) for _, lengths in groups if lengths)
    assert len(micro_batches) >= min(options["min_micro_batches"], most)


@given(groups=GROUPS, options=OPTIONS)
def test_one_token_less_than_the_smallest_budget_is_refused(groups: Groups, options: dict) -> None:
    budget = smallest_budget(groups, options["num_repeated"], options["share_prompt"]) - 1
    if budget > 0 and any(lengths for _, lengths in groups):
        with pytest.raises(ValueError, match=rf"max_tokens_per_micro_batch` \({budget}\).*group \d+ needs \d+"):
            plan(groups, budget, **options)


def test_count_tokens() -> None:
    # Shared: (4 - 1) + (2 + 1) + (1 + 1) = 8. Unshared: (4 + 2) + (4 + 1) = 11.
    assert count_tokens(4, [2, 1]) == 8
    assert count_tokens(4, [2, 1], share_prompt=False) == 11


def test_groups_stay_whole_and_fill_the_bins_evenly() -> None:
    # Tokens: 9 + 1 + 1 = 11, 4 + 2 = 6, 3 + 2 = 5, 9 + 2 = 11; in all 33, so 2 bins of 20.
    # 11 (group 0) and 11 (group 3) take a bin each; 6 (group 1) joins the first; 5 (group 2) the second: 17 and 16.
    groups = [(10, [1]), (5, [1]), (4, [1]), (10, [1])]
    assert parts_of(plan(groups, 20)) == [[(0, [0]), (1, [0])], [(2, [0]), (3, [0])]]


def test_a_group_above_the_budget_is_split_with_the_teacher_in_each_part() -> None:
    # Prompt 5 and teacher of 2: 4 + 3 = 7 in each part. Students of 5, 1, 4, 2: 6, 2, 5 and 3 more; whole 23 > 16.
    # Two parts, longest first: {1: 5}, {3: 4}, the 2 to the emptier {3, 4}, the 1 to {1, 2}: 7 + 8 = 15 each.
    groups = [(5, [2, 5, 1, 4, 2])]
    micro_batches = plan(groups, 16, num_repeated=1)
    assert parts_of(micro_batches) == [[(0, [0, 1, 2])], [(0, [0, 3, 4])]]
    assert [micro_batch.num_tokens for micro_batch in micro_batches] == [15, 15]


def test_a_rank_with_little_to_do_is_cut_further_to_keep_step_with_the_others() -> None:
    groups = [(5, [2, 5, 1]), (3, [1, 1])]
    assert parts_of(plan(groups, 100, num_repeated=1)) == [[(0, [0, 1, 2]), (1, [0, 1])]]
    assert parts_of(plan(groups, 100, num_repeated=1, min_micro_batches=3)) == [
        [(0, [0, 1])],
        [(0, [0, 2])],
        [(1, [0, 1])],
    ]
    # Group 0 has two students and group 1 has one: 3 parts at most.
    assert len(plan(groups, 100, num_repeated=1, min_micro_batches=9)) == 3


def test_parts_of_one_group_that_meet_in_a_micro_batch_store_their_prompt_and_teacher_once() -> None:
    # Tested by itself: in 60,000 random plans it never came up. 4 + (2 + 1) + (5 + 1) + (1 + 1) = 15 tokens.
    sizes = _Sizes([(5, [2, 5, 1])], budget=100, num_repeated=1, share_prompt=True)
    assert sizes.micro_batch([(0, [0, 1]), (0, [0, 2])]) == MicroBatch([(0, [0, 1, 2])], 15)


def test_a_group_without_responses_takes_no_part() -> None:
    assert plan([(5, []), (5, [1])], 100) == [MicroBatch([(1, [0])], 6)]  # 4 + 2 tokens
    assert plan([(500, [])], 100, min_micro_batches=4) == []
    assert plan([], 100) == []


def test_the_message_names_the_group_and_the_way_out() -> None:
    # Group 1: 9 of the prompt, 3 + 1 of the teacher, 5 + 1 of the student: 19.
    with pytest.raises(ValueError, match="group 1 needs 19") as error:
        plan([(2, [1, 1]), (10, [3, 5])], 18, num_repeated=1)
    for word in (
        "prompt 10",
        "[3, 5]",
        "max_tokens_per_micro_batch` to 19",
        "max_prompt_length",
        "max_completion_length",
    ):
        assert word in str(error.value)


def test_rows_that_cannot_be_cut_small_enough_are_refused_before_training() -> None:
    # Row 7: prompt 10 stored as 9, then copies of its last token before the teacher's 4 and the student's 6: 9 + 5 + 7
    kwargs: dict[str, Any] = dict(max_response=6, share_prompt=True)
    check_budget([3, 7], [2, 10], [4, 4], budget=21, **kwargs)
    with pytest.raises(
        ValueError, match=r"row 7 needs 21 tokens \(prompt 10, teacher 4.* 1 of 2 rows.* to 21 or more"
    ):
        check_budget([3, 7], [2, 10], [4, 4], budget=20, **kwargs)
    # Unshared: (10 + 4) + (10 + 6)
    kwargs["share_prompt"] = False
    check_budget([3, 7], [2, 10], [4, 4], budget=30, **kwargs)
    with pytest.raises(ValueError, match=r"row 7 needs 30 tokens.*share_prompt=False"):
        check_budget([3, 7], [2, 10], [4, 4], budget=29, **kwargs)


@settings(deadline=None)
@given(
    prompt=st.integers(1, 30), teacher=st.integers(1, 30), longest=st.integers(1, 30), share=st.booleans(),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), slack=st.integers(-3, 3),
)  # fmt: skip
def test_the_check_before_training_promises_what_plan_keeps(
    prompt: int, teacher: int, longest: int, share: bool, lengths: list[int], slack: int
) -> None:
    budget = count_tokens(prompt, [teacher, longest], share) + slack
    responses = [teacher, *(min(length, longest) for length in lengths)]
    try:
        check_budget([0], [prompt], [teacher], max_response=longest, budget=budget, share_prompt=share)
    except ValueError:
        assert slack < 0
        return
    assert slack >= 0
    plan([(prompt, responses)], budget, num_repeated=1, share_prompt=share)  # the discriminator's pass
    plan([(prompt, responses[1:])], budget, share_prompt=share)  # policy and reference
    plan([(prompt, [teacher])], budget, share_prompt=share)  # the warm-up


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
def test_shares_are_equal_in_number_and_nearly_in_cost(num_shares: int, size: int, draw: Any) -> None:
    costs = [draw.randint(1, 100) for _ in range(num_shares * size)]
    shares = share_out(costs, num_shares)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    assert {len(share) for share in shares} == {size}
    sums = [sum(costs[i] for i in share) for share in shares]
    assert max(sums) - min(sums) <= max(costs)  # a walk by falling cost is never further apart than one item


def test_shares_of_ragged_rows_are_closer_than_neighbours() -> None:
    costs = [100, 90, 80, 10, 10, 10, 5, 5]
    contiguous = [sum(costs[:4]), sum(costs[4:])]  # 280 and 30
    shares = [sum(costs[i] for i in share) for share in share_out(costs, 2)]
    # 100 to the first, 90 and 80 to the second; 10, 10, 10 to the first, which has four then; 5 and 5 to the second
    assert sorted(shares) == [130, 180]
    assert max(shares) / max(contiguous) < 0.65
