"""What a trace of an image-token model shows: the picture by rounds, and refused codes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmspec.codes.image_family import to_images
from mmspec.modalities.image.generation import Images, cell_offsets
from mmspec.tracing.media import image_uri

MOST_PATCHES = 64  # refused codes that are drawn, each a decoding of the whole picture
ROWS = 16  # pictures decoded at once


def find_processor(formatter: Any) -> Any:
    """None: its tokens are codes of a picture."""
    return None


def depict(session: Any, output: Any, trace: Any) -> dict[str, Any]:
    """The view `picture` of generated images; nothing for text."""
    if not isinstance(output, Images):
        return {}
    grid = trace.call.request.shared["grid"]
    offsets = cell_offsets(grid, torch.device("cpu")).flatten().tolist()
    refused = [*_list_refused(trace.rounds, offsets)]
    step = max(1, -(-len(refused) // MOST_PATCHES))
    drawn = _draw_codes(session.image_family, output.ids, refused[::step])
    rows = [
        {
            "image": image_uri(image),
            "grid": [grid.height, grid.width],
            "cells": offsets,
            "patches": {f"{cell}:{code}": uri for (at, cell, code), uri in drawn if at == row},
        }
        for row, image in enumerate(output.images)
    ]
    note = f"{len(drawn)} of {len(refused)} refused codes are drawn." if refused else ""
    return {"picture": {"rows": rows, "note": note}}


def _list_refused(rounds: list[dict[str, Any]], offsets: list[int]) -> Iterator[tuple[int, ...]]:
    """Row, cell and token of every refused code, once each."""
    cells, done = {offset: cell for cell, offset in enumerate(offsets)}, dict[int, int]()
    seen = set[tuple[int, ...]]()
    for round_ in rounds:
        for row, own in enumerate(round_["rows"]):
            start, accepted, depths = done.get(row, 0), {-1, *own["path"]}, list[int]()
            for node, (code, parent) in enumerate(zip(own["draft"], own["parents"], strict=True)):
                depths.append(0 if parent < 0 else depths[parent] + 1)
                cell = cells.get(start + depths[node])
                found = (row, -1 if cell is None else cell, code)
                is_refused = parent in accepted and node not in accepted
                if is_refused and cell is not None and found not in seen:
                    seen.add(found)
                    yield found
            done[row] = start + len(own["tokens"])


@torch.no_grad()
def _draw_codes(
    family: Any, ids: Tensor, refused: list[tuple[int, ...]]
) -> list[tuple[tuple[int, ...], str]]:  # ids (B, H, W)
    """The patch of each refused code, as it would stand in the finished picture."""
    codes, found = family.codebook.codes, []
    for start in range(0, len(refused), ROWS):
        some = refused[start : start + ROWS]
        grids = torch.stack([ids[row] for row, _, _ in some])
        for index, (_, cell, code) in enumerate(some):
            grids[index].view(-1)[cell] = code
        pictures = to_images(family.decode(codes[grids.to(codes.device)]))
        for one, picture in zip(some, pictures, strict=True):
            found.append((one, image_uri(_crop_cell(picture, one[1], ids.shape[1:]))))
    return found


def _crop_cell(picture: Image.Image, cell: int, size: torch.Size) -> Image.Image:
    down, across = picture.height / size[0], picture.width / size[1]
    y, x = divmod(cell, size[1])
    box = (round(x * across), round(y * down), round((x + 1) * across), round((y + 1) * down))
    return picture.crop(box)
