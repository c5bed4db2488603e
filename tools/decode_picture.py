"""Draw `docs/decode.png`: the README's first command, its words by the round that accepted them.

Run `python -m tools.decode_picture`; it prints the alternative text for the README.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

import mmspec
from mmspec import zoo
from mmspec.zoo import language

FILE = Path(__file__).resolve().parents[1] / "docs" / "decode.png"
WIDTH, SCENE, MARGIN, LINE, SIZE = 900, 176, 18, 40, 18  # pixels
COLOURS = ("#cfe3f7", "#fbe3c2", "#d6efd8", "#f6d3dc", "#e4dcf5", "#e6e6da")  # by round
INK, FAINT = "#202020", "#6b6b6b"


def main() -> None:
    """Decode the bundled scene and draw the words."""
    torch.set_num_threads(1)
    fast = mmspec.accelerate("zoo:llava", "coupled")
    processor, scene = zoo.processor("llava"), Image.open(zoo.bundled_scene()).convert("RGB")
    text = language.format_prompt(processor, "describe the picture")
    inputs = processor(text=[text], images=[scene], return_tensors="pt")
    words = [
        (processor.tokenizer.decode([token]), round_.index, index < round_.accepted[0])
        for round_ in fast.stream(**inputs, max_new_tokens=64, do_sample=False)
        for index, token in enumerate(round_.tokens[0])
        if token not in processor.tokenizer.all_special_ids
    ]
    assert fast.last_stats is not None
    calls, tokens = fast.last_stats.target_calls, fast.last_stats.num_new_tokens
    _draw(scene, words, calls, tokens).save(FILE)
    print(
        f"A scene, and its description by LLaVA: {len(words)} words, coloured by the round that "
        f"accepted them, {calls} target calls instead of {tokens - 1}"
    )


def _draw(scene: Image.Image, words: list[tuple[str, int, bool]], calls: int, tokens: int) -> Any:
    font, small = ImageFont.load_default(SIZE), ImageFont.load_default(11)
    page = Image.new("RGB", (WIDTH, SCENE + 2 * MARGIN), "white")
    page.paste(scene.resize((SCENE, SCENE)), (MARGIN, MARGIN))
    draw = ImageDraw.Draw(page)
    left = x = 2.0 * MARGIN + SCENE
    y, last = MARGIN, -1
    for word, index, is_draft in words:
        width = draw.textlength(word, font)
        if x + width > WIDTH - MARGIN:
            x, y = left, y + LINE
        box = (x - 3, y, x + width + 3, y + SIZE + 8)
        draw.rounded_rectangle(box, 4, fill=COLOURS[index % len(COLOURS)])
        draw.text((x, y + 2), word, INK, font)
        if not is_draft:  # the target's own token
            draw.line((x, y + SIZE + 5, x + width, y + SIZE + 5), INK, 1)
        if index != last:
            draw.text((x - 2, y + SIZE + 9), str(index), FAINT, small)
            last = index
        x += width + 8
    note = (
        f"{tokens} tokens in {calls} target calls. Colours and numbers: rounds. Underlined: the "
        "target's own tokens; the others were drafted."
    )
    draw.text((left, SCENE + MARGIN - 12), note, FAINT, small)
    return page


if __name__ == "__main__":
    main()
