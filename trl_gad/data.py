"""Datasets: the check of all rows before training, the order of the rows, and the loader of rollout batches.

This module knows nothing of models and processes; the rank is a number it is given.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
from tqdm.auto import tqdm

from trl_gad.batch import Group
from trl_gad.config import GADConfig
from trl_gad.messages import FORMAT_COLUMNS, OverlongPromptError, OverlongTeacherError, RowError, RowLengths
from trl_gad.pictures import describe
from trl_gad.planner import check_budget, share_out
from trl_gad.rows import RowReader


PROGRESS_FROM_ROWS = 1000
FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
CHUNK = 16  # rows a worker checks before it answers


@dataclass
class RecipeArguments:
    """What a recipe's YAML holds beside `GADConfig` and TRL's `ModelConfig`."""

    dataset: str = field(metadata={"help": "A .jsonl or .parquet file, a folder of `save_to_disk`, or a Hub dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a Hub dataset."})
    eval_rows: int = field(default=0, metadata={"help": "Rows held out for evaluation, the last ones."})
    discriminator: str | None = field(default=None, metadata={"help": "Folder of a discriminator to start from."})


def load_rows(source: str, split: str = "train") -> datasets.Dataset:
    """
    A dataset from a file, a folder of `save_to_disk`, or the Hub.

    Raises:
        ValueError: a file of another kind.
    """
    path = Path(source)
    if path.is_dir():
        rows = datasets.load_from_disk(source)
        if not isinstance(rows, datasets.Dataset):
            raise ValueError(
                f"`dataset` must be one split, and {source!r} holds {', '.join(map(str, rows))}. Name one: its folder."
            )
        return rows
    if path.is_file():
        if path.suffix not in FILE_KINDS:
            raise ValueError(
                f"`dataset` must be one of {', '.join(FILE_KINDS)}, a folder or a Hub name, got {source!r}."
            )
        return datasets.load_dataset(FILE_KINDS[path.suffix], data_files=source, split="train")
    return datasets.load_dataset(source, split=split)


class _Rows:
    """A map-style dataset whose pictures arrive undecoded, so that a broken file is an error of its row."""

    def __init__(self, dataset: Any):
        if isinstance(dataset, datasets.IterableDataset | torch.utils.data.IterableDataset):
            raise ValueError(
                "The dataset must know its rows, to check them before training and to resume: an iterable dataset, got "
                f"{type(dataset).__name__}. Load it with streaming=False, or save it and load it from disk."
            )
        if isinstance(dataset, dict):
            raise ValueError(f"Pass one split, got a dict of {sorted(dataset)}. Use dataset['train'].")
        if len(dataset) == 0:
            raise ValueError("The dataset has no rows. Pass one with at least one row.")
        self.dataset: Any = dataset
        self.features: datasets.Features | None = None
        # A user's own transform (type "custom") decides itself what a row looks like.
        if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
            self.features = copy.deepcopy(dataset.features)
            for column in FORMAT_COLUMNS & set(self.features):
                self.features[column] = _undecoded(self.features[column])
            self.dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            if self.features is None:
                return self.dataset[index]
            return self.features.decode_example(self.dataset[index].to_pylist()[0])
        except (OSError, ValueError, SyntaxError) as error:
            # A column beside the prompt's (for rewards, say) may hold a broken file too.
            raise RowError(f"Row {index} cannot be read ({describe(str(error), 200)}). Remove it.") from error


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, datasets.Image):
        return datasets.Image(mode=feature.mode, decode=False)
    if isinstance(feature, datasets.List):
        return datasets.List(_undecoded(feature.feature), length=feature.length)
    if isinstance(feature, dict):
        return {key: _undecoded(item) for key, item in feature.items()}
    return feature


@dataclass
class Spread:
    """Least, middle, 95th percentile and largest of a list of counts."""

    min: int = 0
    median: int = 0
    p95: int = 0
    max: int = 0

    @staticmethod
    def of(values: list[int]) -> "Spread":
        """
        >>> Spread.of([5, 1, 3])
        Spread(min=1, median=3, p95=5, max=5)
        """
        if not values:
            return Spread()
        return Spread(*(int(value) for value in np.percentile(values, [0, 50, 95, 100], method="nearest")))


@dataclass
class DataReport:
    """What [`check_dataset`] found. Equal on all ranks, and can be sent to them."""

    num_rows: int
    kept: list[int] = field(default_factory=list)  # dataset indices to train on, ascending
    prompt_lengths: list[int] = field(default_factory=list)  # of each kept row, in tokens after image expansion
    teacher_lengths: list[int] = field(default_factory=list)  # of each kept row, in tokens with the end token
    dropped: dict[str, list[int]] = field(default_factory=dict)  # reason -> dataset indices
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first such row's message
    num_cut_teachers: int = 0
    num_images: int = 0
    prompt_tokens: Spread = field(default_factory=Spread)  # of kept rows, after image expansion
    teacher_tokens: Spread = field(default_factory=Spread)  # of kept rows, with the end token
    image_tokens: Spread = field(default_factory=Spread)  # of each image in the kept rows

    def check_budget(self, args: GADConfig) -> None:
        """Refuses kept rows that no micro-batch of such a run can hold, see `planner.check_budget`."""
        assert args.max_completion_length is not None, "checked by GADConfig"
        check_budget(
            self.kept, self.prompt_lengths, self.teacher_lengths, max_response=args.max_completion_length,
            budget=args.max_tokens_per_micro_batch, share_prompt=args.share_prompt,
        )  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{len(self.kept)} of {self.num_rows} rows kept, {self.num_images} images"]
        if self.num_cut_teachers:
            lines.append(f"{self.num_cut_teachers} teacher responses cut, without an end token")
        spreads = {"prompt": self.prompt_tokens, "teacher": self.teacher_tokens, "image": self.image_tokens}
        lines += [
            f"{name + ' tokens':<15}min {spread.min}  median {spread.median}  p95 {spread.p95}  max {spread.max}"
            for name, spread in spreads.items()
            if spread.max > 0  # no rows, or no images
        ]
        for reason, rows in self.dropped.items():
            shown = ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")
            lines.append(f"dropped, {reason}: {len(rows)} (rows {shown}); the first: {self.examples[reason]}")
        return "\n".join(lines)


@dataclass
class _Refusal:
    """A `RowError` as a value: raised in a worker process, it would arrive wrapped in the worker's traceback."""

    kind: type[RowError]
    message: str


class _Read(torch.utils.data.Dataset):
    """Maps a list of row indices to what a method of the reader makes of each row."""

    def __init__(self, rows: _Rows, method: Callable[[int, dict[str, Any]], Any]):
        self.rows, self.method = rows, method

    def __getitem__(self, indices: list[int]) -> list[Any]:
        return [self._read(index) for index in indices]

    def _read(self, index: int) -> Any:
        try:
            return self.method(index, self.rows[index])
        except RowError as error:
            return _Refusal(type(error), str(error))


def check_dataset(
    dataset: Any,
    reader: RowReader,
    *,
    bad_rows: Literal["raise", "skip"] = "raise",
    num_workers: int = 0,
    progress: bool = True,
) -> DataReport:
    """Reads every row once, so that none fails in the middle of a run.

    Args:
        dataset (`datasets.Dataset`, or anything with a length and dicts under row numbers):
            Not an iterable dataset.
        reader ([`RowReader`]):
            Its `overlong_prompts` and `overlong_teachers` say what becomes of rows that are too long.
        bad_rows (`str`, *optional*, defaults to `"raise"`):
            `"raise"` stops at the first bad row; `"skip"` leaves it out, counts it and names it in the report.
        num_workers (`int`, *optional*, defaults to `0`):
            Processes that read; `0` reads in this one. The report does not depend on it.
        progress (`bool`, *optional*, defaults to `True`):
            Show a progress bar for more than 1000 rows.

    Raises:
        [`RowError`]: A row that the options do not drop.
        `ValueError`: A dataset without row numbers, or no row is left.
    """
    source = _Rows(dataset)
    is_dropped = {
        RowError: bad_rows == "skip",
        OverlongPromptError: reader.overlong_prompts == "drop",
        OverlongTeacherError: reader.overlong_teachers == "drop",
    }
    chunks = [list(range(i, min(i + CHUNK, len(source)))) for i in range(0, len(source), CHUNK)]
    outcomes = _ordered(_Read(source, reader.measure), chunks, num_workers, ahead=4 * num_workers)
    report = DataReport(num_rows=len(source))
    lengths: list[RowLengths] = []
    with tqdm(
        total=len(source), desc="checking rows", disable=not progress or len(source) <= PROGRESS_FROM_ROWS
    ) as bar:
        for chunk, results in zip(chunks, outcomes, strict=True):
            bar.update(len(chunk))
            for index, result in zip(chunk, results, strict=True):
                if isinstance(result, RowLengths):
                    lengths.append(result)
                    report.kept.append(index)
                elif is_dropped[result.kind]:
                    report.dropped.setdefault(result.kind.reason, []).append(index)
                    report.examples.setdefault(result.kind.reason, result.message)
                else:
                    way_out = " Or set bad_rows='skip'." if result.kind is RowError else ""
                    raise result.kind(result.message + way_out)
    images = [num_tokens for row in lengths for num_tokens in row.images]
    report.num_images = len(images)
    report.num_cut_teachers = sum(row.teacher_cut for row in lengths)
    report.prompt_lengths = [row.prompt for row in lengths]
    report.teacher_lengths = [row.teacher for row in lengths]
    report.prompt_tokens = Spread.of(report.prompt_lengths)
    report.teacher_tokens = Spread.of(report.teacher_lengths)
    report.image_tokens = Spread.of(images)
    if not lengths:
        raise ValueError(f"No row is left to train on. {report}\nMend the rows, or raise the limits named above.")
    return report


def _ordered(dataset: torch.utils.data.Dataset, keys: Iterable[Any], num_workers: int, ahead: int) -> Iterator[Any]:
    """`dataset[key]` for each key, in order, read by worker processes that run up to about `ahead` items ahead."""
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        sampler=keys,
        num_workers=num_workers,
        prefetch_factor=max(1, math.ceil(ahead / num_workers)) if num_workers else None,
        collate_fn=_as_it_is,
        # A generator of its own: the loader draws its workers' seed, and drawn from the global generator that would
        # change every later random number of the run.
        generator=torch.Generator(),
    )
    return iter(loader)


def _as_it_is(item: Any) -> Any:
    return item


# --- Order and loader ------------------------------------------------------------------------------------------------


def row_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    """Order of the rows in an epoch: a permutation that depends on seed and epoch only.

    >>> row_order(5, seed=0, epoch=0), row_order(5, seed=0, epoch=1)
    ([2, 4, 3, 0, 1], [1, 4, 3, 0, 2])
    >>> row_order(5, seed=0, epoch=1, shuffle=False)
    [0, 1, 2, 3, 4]
    """
    if not shuffle:
        return list(range(num_rows))
    return np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()


def prompts_of_rollout(
    num_rows: int, prompts_per_rollout: int, seed: int, rollout_index: int, shuffle: bool = True
) -> list[int]:
    """Rows of a rollout batch. The rollouts walk the epochs' orders laid end to end, so that nothing is dropped.

    With five rows and two prompts a rollout, the third rollout takes the last row of the first epoch and the first row
    of the second:

    >>> [prompts_of_rollout(5, 2, seed=0, rollout_index=i) for i in range(5)]
    [[2, 4], [3, 0], [1, 1], [4, 3], [0, 2]]
    >>> row_order(5, seed=0, epoch=0) + row_order(5, seed=0, epoch=1)
    [2, 4, 3, 0, 1, 1, 4, 3, 0, 2]
    """
    rows: list[int] = []
    position = rollout_index * prompts_per_rollout
    while len(rows) < prompts_per_rollout:
        epoch, start = divmod(position + len(rows), num_rows)
        missing = prompts_per_rollout - len(rows)
        rows += row_order(num_rows, seed, epoch, shuffle)[start : start + missing]
    return rows


class RolloutLoader:
    """Gives `(rollout_index, groups of this rank)`, from rollout `start` up to `stop` (not included).

    Each rank reads as many of a rollout's prompts as any other, and every picture once. The prompts of every optimizer
    step are shared out on their own, so that a step trains on the same prompts whatever the number of ranks. Iterating
    again starts again at `start`; to resume, build a loader with a later `start`.

    Args:
        rows (`Sequence[int]`):
            The dataset indices to use: `DataReport.kept`.
        prompts_per_rollout (`int`):
            Over all ranks; a multiple of `num_processes` times `steps_per_rollout`.
        steps_per_rollout (`int`, *optional*, defaults to `1`):
            Optimizer steps that share a rollout; each takes the next equal part of its prompts.
        costs (`Sequence[int]`, *optional*):
            Expected tokens of each of `rows`: the ranks of a step get sums as equal as may be. Without, each takes the
            next equal share.
        num_workers (`int`, *optional*, defaults to `0`):
            Processes that decode and tokenize; `0` does it in this one, when a rollout is asked for. Groups travel
            through shared memory (in a container: its `--shm-size`), decoded pictures at their original size.
        prefetch_rows (`int`, *optional*, defaults to this rank's prompts of one rollout):
            Rows the workers read ahead while a rollout is being trained on.

    Raises:
        [`RowError`]: While iterating, when a file has changed since [`check_dataset`].
    """

    def __init__(
        self,
        dataset: Any,
        reader: RowReader,
        *,
        rows: Sequence[int],
        prompts_per_rollout: int,
        seed: int,
        stop: int,
        start: int = 0,
        shuffle: bool = True,
        steps_per_rollout: int = 1,
        costs: Sequence[int] | None = None,
        rank: int = 0,
        num_processes: int = 1,
        num_workers: int = 0,
        prefetch_rows: int | None = None,
    ):
        if prompts_per_rollout < 1 or prompts_per_rollout % (num_processes * steps_per_rollout):
            raise ValueError(
                f"A step's prompts are shared equally by all processes, got {prompts_per_rollout} prompts for "
                f"{num_processes} processes and {steps_per_rollout} steps. Make the prompts a multiple of both."
            )
        if not rows:
            raise ValueError("The loader needs at least one row, got none. See the report of check_dataset.")
        self.read = _Read(_Rows(dataset), reader.read)
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.start, self.stop = start, stop
        self.prompts_per_rollout, self.rank, self.num_processes = prompts_per_rollout, rank, num_processes
        self.steps_per_rollout, self.costs = steps_per_rollout, costs
        self.prompts_per_rank = prompts_per_rollout // num_processes
        self.num_workers = num_workers
        self.prefetch_rows = self.prompts_per_rank if prefetch_rows is None else prefetch_rows

    def __len__(self) -> int:
        """Rollouts from `start` to `stop`."""
        return max(0, self.stop - self.start)

    def rows_of_rollout(self, rollout_index: int) -> list[int]:
        """This rank's dataset indices of a rollout."""
        places = prompts_of_rollout(len(self.rows), self.prompts_per_rollout, self.seed, rollout_index, self.shuffle)
        size = self.prompts_per_rollout // self.steps_per_rollout
        own = []
        for start in range(0, len(places), size):
            part = places[start : start + size]
            if self.costs is None:
                first, number = self.rank * size // self.num_processes, size // self.num_processes
                chosen = range(first, first + number)
            else:
                chosen = share_out([self.costs[place] for place in part], self.num_processes)[self.rank]
            own += [self.rows[part[i]] for i in chosen]
        return own

    def __iter__(self) -> Iterator[tuple[int, list[Group]]]:
        results = _ordered(self.read, _Keys(self), self.num_workers, self.prefetch_rows)
        for rollout_index in range(self.start, self.stop):
            yield rollout_index, [self._own(next(results)[0]) for _ in range(self.prompts_per_rank)]

    def _own(self, result: Group | _Refusal) -> Group:
        if isinstance(result, _Refusal):
            raise result.kind(result.message)
        if self.num_workers:
            for picture in result.pictures:
                # A tensor from a worker keeps a file descriptor open for as long as it lives; a large rollout would
                # use them up.
                picture.pixel_values = picture.pixel_values.clone()
        return result


class _Keys:
    """The loader's row indices one by one, rollout after rollout, worked out when they are needed."""

    def __init__(self, loader: RolloutLoader):
        self.loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        for rollout_index in range(self.loader.start, self.loader.stop):
            yield from ([row] for row in self.loader.rows_of_rollout(rollout_index))
