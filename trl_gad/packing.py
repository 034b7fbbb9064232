"""Rows -> one sequence without padding. Pure: knows token ids and positions, no model.

A row stores its prompt once, whatever the number of responses. `attention.py` lets each response see the prompt and
itself only, so its logits are those of [prompt | response] alone.
"""

import torch

from trl_gad.batch import Pack, Row, Segment


def num_tokens(row: Row) -> int:
    """Tokens that `row` takes in a pack.

    >>> num_tokens(Row([1, 2, 3], [[7, 8], [9]]))  # 2 of the prompt, 1 + 2, 1 + 1
    7
    """
    return len(row.prompt_ids) - 1 + sum(len(response) + 1 for response in row.responses)


def unshared(rows: list[Row]) -> list[Row]:
    """One row per response, in the same order of responses: the prompt and its pictures are stored with each."""
    return [Row(row.prompt_ids, [response], row.pictures) for row in rows for response in row.responses]


def pack(rows: list[Row], positions: list[torch.Tensor]) -> Pack:
    """Lay `rows` one after the other; the example is in the docstring of `Pack`.

    Args:
        rows (`list[Row]`): at least one response in all; no response is empty.
        positions (`list[torch.Tensor]`): of each row's prompt, `[3, len(prompt_ids)]` int64. The prompt ends in text,
            so its last token holds the largest position, and the response goes on from there.

    Raises:
        ValueError: a prompt without tokens.
    """
    assert len(rows) == len(positions), f"{len(rows)} rows, {len(positions)} position tensors"
    input_ids, labels, places = [], [], []
    first, lengths, segments = [], [], []
    for number, (row, position) in enumerate(zip(rows, positions, strict=True)):
        _check(number, row, position)
        start = len(input_ids)
        # The last token is not stored with the prompt: each response starts with a copy of it.
        input_ids += row.prompt_ids[:-1]
        labels += [-100] * (len(row.prompt_ids) - 1)
        places.append(position[:, :-1])
        segment = Segment(prompt=(start, len(input_ids)), responses=[])
        for response in row.responses:
            begin = len(input_ids)
            input_ids += [row.prompt_ids[-1], *response]
            labels += [-100, *response]
            places.append(position[:, -1:] + torch.arange(len(response) + 1))
            segment.responses.append((begin, len(input_ids)))
            first.append(begin)
            lengths.append(len(response))
        segments.append(segment)
    assert first, "a pack without a response has nothing to predict"
    pictures = [picture for row in rows for picture in row.pictures]
    result = Pack(
        input_ids=torch.tensor(input_ids),
        labels=torch.tensor(labels),
        positions=torch.cat(places, dim=1),
        first=torch.tensor(first),
        lengths=torch.tensor(lengths),
        segments=segments,
        image_grid_thw=torch.tensor([picture.grid_thw for picture in pictures]) if pictures else None,
        pictures=pictures,
    )
    num_packed = sum(num_tokens(row) for row in rows)
    assert result.positions.shape == (3, num_packed), f"{tuple(result.positions.shape)} != (3, {num_packed})"
    return result


def _check(number: int, row: Row, position: torch.Tensor) -> None:
    if not row.prompt_ids:
        raise ValueError(
            f"Row {number} of the pack has an empty prompt: a response needs one token before it to be predicted from. "
            "Give the prompt a text, or use a chat template with a generation prompt."
        )
    assert position.shape == (3, len(row.prompt_ids)), f"{tuple(position.shape)}, {len(row.prompt_ids)} prompt tokens"
    assert all(row.responses), "empty responses are left out by the caller"
    assert bool((position <= position[:, -1:].min()).all()), "the prompt's last token holds the largest position"
