"""The data of `mmspec train`: rows are read and checked before the target is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from mmspec.cli.output import show_status
from mmspec.cli.training_folder import TrainingFolder
from mmspec.cli.training_plan import TrainOptions
from mmspec.modality import TrainingData
from mmspec.training.conversations import DataSet, media_base, read_data_set
from mmspec.training.media import Media, MediaFolders, download
from mmspec.training.processes import Processes

MAX_THREADS = 32
_CHUNK = 4096  # media that are handed to the threads at once


def read_data(options: TrainOptions, teaching: TrainingData, processes: Processes) -> DataSet:
    """Read the rows of --data and open their media once, each in one of the processes.

    Raises ValueError for more bad rows than --max-bad-rows, and for fewer than two good ones.
    """
    downloads = TrainingFolder(options.out).downloads if options.allow_urls else None
    folders = MediaFolders(media_base(options.data, options.images), options.image_root, downloads)
    found = read_data_set(options.data, folders)
    found.check(options.max_bad_rows)
    with show_status("checking images", options.json):
        own = _unreadable_rows(found, teaching.check_media, options.dry_run, processes)
        shares = processes.gather(own)
        found = found.leave_out({row: why for one in shares for row, why in one.items()})
    check_rows(found, options)
    return found


def check_rows(data: DataSet, options: TrainOptions) -> None:
    """Refuse too many bad rows, and data that leave nothing to hold out. Raises ValueError."""
    data.check(options.max_bad_rows)
    if len({one.row for one in data.questions}) < 2:
        bad = f" that can be used ({data.bad[0]})" if data.bad else ""
        raise ValueError(
            f"{options.data} has one row{bad}; give two or more, one of them is held out"
        )


def _unreadable_rows(
    data: DataSet, check: Callable[[Media], None], is_dry: bool, processes: Processes
) -> dict[int, str]:
    """Why rows have media that this process cannot read; a dry run downloads none."""
    rows_of: dict[Media, set[int]] = {}
    for one in data.questions:
        for media in (*one.images, *one.videos):
            if not (is_dry and media.url is not None):
                rows_of.setdefault(media, set()).add(one.row)
    found: dict[int, str] = {}
    own = list(rows_of)[processes.rank :: processes.size]
    for media, reason in _check_all(own, check):
        if reason is not None:
            found |= dict.fromkeys(rows_of[media], reason)
    return found


def _check_all(
    media: list[Media], check: Callable[[Media], None]
) -> Iterator[tuple[Media, str | None]]:
    def find_problem(one: Media) -> str | None:
        try:
            if one.url is not None:
                download(one)
            check(one)
        except ValueError as error:
            return str(error) if one.url is not None else f"names {one.name}: {error}"
        return None

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        for start in range(0, len(media), _CHUNK):
            chunk = media[start : start + _CHUNK]
            yield from zip(chunk, threads.map(find_problem, chunk), strict=True)


def list_bad_rows(data: DataSet) -> list[dict[str, str]]:
    """Bad rows as JSON."""
    return [{"place": one.place, "reason": one.reason} for one in data.bad]
