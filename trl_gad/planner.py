"""Groups -> micro-batches under a token budget. Pure: knows lengths only.

How a step is cut changes its speed and its memory, never its result. Every rank calls `plan` with its own groups, the
ranks agree on the largest number of micro-batches, and each calls `plan` again with that as `min_micro_batches`.
"""

from collections.abc import Iterator
from dataclasses import dataclass


Part = tuple[int, list[int]]  # (index of a group, indices of its responses, ascending)


@dataclass
class MicroBatch:
    """What goes through one forward: parts of groups, in the order of the groups."""

    parts: list[Part]
    num_tokens: int  # as the pack stores them

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def count_tokens(prompt_length: int, response_lengths: list[int], share_prompt: bool = True) -> int:
    """Tokens that one prompt with these responses takes in a pack.

    >>> count_tokens(3, [2, 1])  # prompt[:-1], then each response with a copy of the prompt's last token: 2 + 3 + 2
    7
    >>> count_tokens(3, [2, 1], share_prompt=False)  # (3 + 2) + (3 + 1)
    9
    """
    if share_prompt:
        return prompt_length - 1 + sum(length + 1 for length in response_lengths)
    return sum(prompt_length + length for length in response_lengths)


def check_budget(
    rows: list[int],
    prompt_lengths: list[int],
    teacher_lengths: list[int],
    *,
    max_response: int,
    budget: int,
    share_prompt: bool,
) -> None:
    """Refuse, before training, rows whose smallest part `plan` could not put into the budget.

    That part is the discriminator's: the prompt, the teacher's response, and one of the student's, of which only the
    longest possible length is known.

    Args:
        rows (`list[int]`): numbers in the dataset, for the message.
        prompt_lengths, teacher_lengths (`list[int]`): of these rows, in tokens.
        max_response (`int`): `max_completion_length`.
        budget (`int`): `max_tokens_per_micro_batch`.

    Raises:
        ValueError: the largest such row needs more than `budget`.
    """
    needs = [
        count_tokens(prompt, [teacher, max_response], share_prompt)
        for prompt, teacher in zip(prompt_lengths, teacher_lengths, strict=True)
    ]
    if (most := max(needs, default=0)) <= budget:
        return
    largest = needs.index(most)
    raise ValueError(
        "A prompt, its teacher's response and one response of the student must fit into `max_tokens_per_micro_batch` "
        f"({budget}): row {rows[largest]} needs {most} tokens (prompt {prompt_lengths[largest]}, teacher "
        f"{teacher_lengths[largest]}, `max_completion_length` {max_response}"
        f"{'' if share_prompt else ', share_prompt=False'}), and {sum(need > budget for need in needs)} of {len(rows)} "
        f"rows need too many. Raise `max_tokens_per_micro_batch` to {most} or more, or lower `max_prompt_length` or "
        "`max_completion_length`."
    )


def share_out(costs: list[int], num_shares: int) -> list[list[int]]:
    """Equally many items for each share, whose costs are as equal as a greedy walk makes them.

    Returns:
        `list[list[int]]`: indices into `costs`, ascending within a share.

    >>> share_out([9, 8, 1, 2], 2)  # 9 first, 8 to the other; 2 to the one with 8 (10), 1 to the one with 9 (10)
    [[0, 2], [1, 3]]
    >>> share_out([5, 7, 6], 1)
    [[0, 1, 2]]
    """
    assert len(costs) % num_shares == 0, f"{len(costs)} items cannot be shared equally by {num_shares}"
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    fill = [0] * num_shares
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        open_shares = [i for i in range(num_shares) if len(shares[i]) < len(costs) // num_shares]
        least = min(open_shares, key=lambda i: (fill[i], i))
        shares[least].append(item)
        fill[least] += costs[item]
    return [sorted(share) for share in shares]


def plan(
    groups: list[tuple[int, list[int]]],
    budget: int,
    *,
    num_repeated: int = 0,
    share_prompt: bool = True,
    min_micro_batches: int = 1,
) -> list[MicroBatch]:
    """Cut `groups` into micro-batches of at most `budget` tokens.

    Groups stay whole where they fit. The result depends on the arguments alone.

    Args:
        groups (`list[tuple[int, list[int]]]`): (prompt length, response lengths) of each, in tokens. A group without
            responses is left out.
        budget (`int`): tokens of a micro-batch, as the pack stores them.
        num_repeated (`int`): the first responses of a group that go into each of its parts (the teacher, in the
            discriminator's pass).
        share_prompt (`bool`): whether a part stores its prompt once, or once per response.
        min_micro_batches (`int`): at least so many micro-batches, as long as there are responses to cut further.

    Raises:
        ValueError: a group whose prompt, repeated responses and one more response exceed `budget`.
    """
    for prompt_length, lengths in groups:
        assert prompt_length > 0, "empty prompts are refused earlier"
        assert all(length > 0 for length in lengths), "empty responses are left out by the caller"
    sizes = _Sizes(groups, budget, num_repeated, share_prompt)
    parts = [part for group, (_, lengths) in enumerate(groups) if lengths for part in sizes.split(group)]
    sizes.split_further(parts, min_micro_batches)
    if not parts:
        return []
    total = sum(sizes.count(part) for part in parts)
    num_bins = max(-(-total // budget), min(min_micro_batches, len(parts)))
    while (bins := sizes.distribute(parts, num_bins)) is None:
        num_bins += 1
    micro_batches = [sizes.micro_batch(parts_of_bin) for parts_of_bin in bins]
    return sorted(micro_batches, key=lambda micro_batch: micro_batch.parts)


@dataclass
class _Sizes:
    """The arguments of `plan` that decide how many tokens a part takes."""

    groups: list[tuple[int, list[int]]]
    budget: int
    num_repeated: int
    share_prompt: bool

    def count(self, part: Part) -> int:
        prompt_length, lengths = self.groups[part[0]]
        return count_tokens(prompt_length, [lengths[i] for i in part[1]], self.share_prompt)

    def repeated(self, group: int) -> list[int]:
        return list(range(min(self.num_repeated, len(self.groups[group][1]))))

    def cut(self, group: int, responses: list[int], num_parts: int) -> list[Part]:
        """Spread `responses`, longest first, each into the part that is least filled; the repeated go into all."""
        prompt_length, lengths = self.groups[group]
        around = 1 if self.share_prompt else prompt_length  # tokens that a response brings beside its own
        bins: list[list[int]] = [[] for _ in range(num_parts)]
        fill = [0] * num_parts
        for response in sorted(responses, key=lambda i: (-lengths[i], i)):
            least = fill.index(min(fill))
            bins[least].append(response)
            fill[least] += lengths[response] + around
        return [(group, self.repeated(group) + sorted(responses)) for responses in bins]

    def split(self, group: int) -> list[Part]:
        """The whole group where it fits, else the smallest number of parts that fit."""
        own = list(range(len(self.repeated(group)), len(self.groups[group][1])))
        repeated = self.repeated(group)
        smallest = [(group, [*repeated, i]) for i in own] or [(group, repeated)]
        largest = max(smallest, key=self.count)
        if (tokens := self.count(largest)) > self.budget:
            prompt_length, lengths = self.groups[group]
            raise ValueError(
                f"A prompt must fit into `max_tokens_per_micro_batch` ({self.budget}) with one response"
                f"{' and what is compared with it' if repeated else ''}: group {group} needs {tokens} tokens (prompt "
                f"{prompt_length}, responses {[lengths[i] for i in largest[1]]}). Raise `max_tokens_per_micro_batch` "
                f"to {tokens} or more, or lower `max_prompt_length` or `max_completion_length`."
            )
        parts = self.cut(group, own, 1)
        while any(self.count(part) > self.budget for part in parts):
            parts = self.cut(group, own, len(parts) + 1)
        return parts

    def split_further(self, parts: list[Part], num_parts: int) -> None:
        """Halve the largest part again and again, in place, until there are `num_parts` or nothing is left to cut."""
        while len(parts) < num_parts:
            own = [part[1][len(self.repeated(part[0])) :] for part in parts]
            cuttable = [i for i, responses in enumerate(own) if len(responses) > 1]
            if not cuttable:
                return
            largest = max(cuttable, key=lambda i: (self.count(parts[i]), -i))
            parts[largest : largest + 1] = self.cut(parts[largest][0], own[largest], 2)

    def distribute(self, parts: list[Part], num_bins: int) -> list[list[Part]] | None:
        """Longest part first into the least filled bin; None where one does not fit."""
        bins: list[list[Part]] = [[] for _ in range(num_bins)]
        fill = [0] * num_bins
        for part in sorted(parts, key=lambda part: (-self.count(part), part)):
            least = fill.index(min(fill))
            fill[least] += self.count(part)
            if fill[least] > self.budget:
                return None
            bins[least].append(part)
        return [parts_of_bin for parts_of_bin in bins if parts_of_bin]

    def micro_batch(self, parts: list[Part]) -> MicroBatch:
        """Parts of one group that met in a bin become one again: the prompt is stored once."""
        responses: dict[int, set[int]] = {}
        for group, indices in sorted(parts):
            responses.setdefault(group, set()).update(indices)
        merged = [(group, sorted(indices)) for group, indices in responses.items()]
        return MicroBatch(merged, sum(self.count(part) for part in merged))
