import pytest
import torch

from trl_gad.batch import Picture, Row
from trl_gad.packing import num_tokens, pack, unshared


def text_positions(length: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + length).expand(3, -1)


def picture(value: float, grid: tuple[int, int, int] = (1, 2, 2)) -> Picture:
    return Picture(torch.full((4, 3), value), grid)


def test_one_row_is_laid_out_as_the_docstring_of_pack_says() -> None:
    result = pack([Row([1, 2, 3], [[7, 8], [9]])], [text_positions(3)])
    assert result.input_ids.tolist() == [1, 2, 3, 7, 8, 3, 9]
    assert result.labels.tolist() == [-100, -100, -100, 7, 8, -100, 9]
    assert result.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3]] * 3
    assert result.first.tolist() == [2, 5]
    assert result.lengths.tolist() == [2, 1]
    assert result.last.tolist() == [4, 6]
    assert (result.segments[0].prompt, result.segments[0].responses) == ((0, 2), [(2, 5), (5, 7)])
    assert result.pictures == []
    assert result.image_grid_thw is None
    assert {t.dtype for t in (result.input_ids, result.labels, result.positions, result.first)} == {torch.int64}


def test_rows_follow_one_another_and_a_prompt_of_one_token_lives_in_its_copies() -> None:
    result = pack([Row([1, 2], [[7]]), Row([5], [[8], [9]])], [text_positions(2), text_positions(1)])
    assert result.input_ids.tolist() == [1, 2, 7, 5, 8, 5, 9]
    assert result.labels.tolist() == [-100, -100, 7, -100, 8, -100, 9]
    assert result.positions[0].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert [(s.prompt, s.responses) for s in result.segments] == [((0, 1), [(1, 3)]), ((3, 3), [(3, 5), (5, 7)])]
    assert result.last.tolist() == [2, 4, 6]


def test_a_response_goes_on_from_the_position_of_the_prompts_last_token() -> None:
    # Text at 0, an image of 1 x 2 tokens at 1 + (0, row, column), then text at 1 + max(1, 2) = 3.
    position = torch.tensor([[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]])
    result = pack([Row([1, 9, 9, 2], [[7, 8], [7]], [picture(1.0)])], [position])
    assert result.positions.tolist() == [
        [0, 1, 1, 3, 4, 5, 3, 4],
        [0, 1, 1, 3, 4, 5, 3, 4],
        [0, 1, 2, 3, 4, 5, 3, 4],
    ]


def test_pictures_are_stored_once_per_row_whatever_the_number_of_responses() -> None:
    rows = [
        Row([1, 2], [[7], [8], [9]], [picture(1.0), picture(2.0, (1, 4, 1))]),
        Row([1, 2], [[7]]),
        Row([1, 2], [[7], [8]], [picture(3.0)]),
    ]
    result = pack(rows, [text_positions(2)] * 3)
    assert result.image_grid_thw is not None
    assert [picture.pixel_values[0, 0].item() for picture in result.pictures] == [1.0, 2.0, 3.0]
    assert result.image_grid_thw.tolist() == [[1, 2, 2], [1, 4, 1], [1, 2, 2]]


def test_unshared_rows_keep_the_order_of_the_responses_and_their_pictures() -> None:
    shown = picture(1.0)
    rows = [Row([1, 2], [[7], [8, 8]], [shown]), Row([3], [[9]])]
    assert unshared(rows) == [Row([1, 2], [[7]], [shown]), Row([1, 2], [[8, 8]], [shown]), Row([3], [[9]])]
    # Shared: 1 + (1 + 1) + (1 + 2) = 6. Unshared: 2 + 1 = 3 and 2 + 2 = 4.
    assert num_tokens(rows[0]) == 6
    assert [num_tokens(row) for row in unshared(rows)] == [3, 4, 2]
    both = [pack(some, [text_positions(len(row.prompt_ids)) for row in some]) for some in (rows, unshared(rows))]
    assert both[0].lengths.tolist() == both[1].lengths.tolist() == [1, 2, 1]
    assert both[1].input_ids.tolist() == [1, 2, 7, 1, 2, 8, 8, 3, 9]


def test_an_empty_prompt_is_refused_with_its_row() -> None:
    with pytest.raises(ValueError, match=r"Row 1 of the pack has an empty prompt.*Give the prompt a text"):
        pack([Row([1], [[7]]), Row([], [[7]])], [text_positions(1), text_positions(0)])


@pytest.mark.parametrize(
    ("row", "position"),
    [
        (Row([1, 2], [[7], []]), text_positions(2)),  # an empty response
        (Row([1, 2], [[7]]), text_positions(3)),  # positions of another prompt
        (Row([1, 2], [[7]]), torch.tensor([[5, 1]] * 3)),  # a prompt that does not end at its largest position
        (Row([1, 2], []), text_positions(2)),  # nothing to predict
    ],
)
def test_what_callers_must_not_pass_is_asserted(row: Row, position: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        pack([row], [position])
