"""The built-in data set: drawn scenes of coloured shapes, five captions each, a box per phrase.

Everything about a picture follows from its split and its index, so the data set needs no files and
is the same on every machine. Each caption names the colour and the shape of every object:
`described` reads them back, and a model's caption is right when it describes what the reference
describes. Some colour-shape pairs appear in the split `test_novel` alone, where each picture holds
at least one: a model that names it has put colour and shape together by itself.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from PIL import Image, ImageChops, ImageDraw

from vlattn.data.records import Phrase, Record

SPLITS = {"train": 4000, "dev": 200, "test": 500, "test_novel": 200}
COLOURS = {
    "red": (214, 36, 40),
    "orange": (246, 134, 24),
    "yellow": (246, 212, 34),
    "green": (38, 154, 72),
    "blue": (34, 92, 206),
    "purple": (138, 58, 176),
    "black": (34, 34, 40),
}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
SIZES = {"small": 0.15, "large": 0.2}  # radius as a fraction of the picture
TEXTURES = ("plain", "striped", "dotted")
HELD_OUT = (
    ("red", "star"),
    ("green", "ring"),
    ("blue", "triangle"),
    ("yellow", "cross"),
    ("purple", "square"),
)
NUMBERS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4}

_PAIRS = [(c, s) for c in COLOURS for s in SHAPES if (c, s) not in HELD_OUT]
_TINTS = ("#faf9f6", "#f4ecde", "#dee9f4", "#e4f0e2", "#f2e2e8", "#d8d9df")
_GAP = 0.03  # between two objects, and between an object and the border; fraction of the picture
_OVERSAMPLING = 4
_OPENERS = ("", "there {be} ", "a picture of ", "we see ", "this picture shows ")
_DIRECTIONS = (("to the left of", "to the right of"), ("above", "below"))  # by axis
_CLAIM = re.compile(
    rf"\b(?:({'|'.join(NUMBERS)}) )?(?:(?:{'|'.join((*SIZES, *TEXTURES))}) )*"
    rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})(?:e?s)?\b"
)


class Thing(NamedTuple):
    """One object of a scene; the box (left, top, right, bottom) is in fractions of the picture."""

    colour: str
    shape: str
    size: str
    texture: str
    box: tuple[float, float, float, float]


class Group(NamedTuple):
    """Objects that one noun phrase names together."""

    noun: str
    things: tuple[Thing, ...]


def scenes(split: str, *, size: int = 128, count: int | None = None) -> list[Record]:
    """Draws one split of the data set.

    Args:
        split: "train", "dev", "test" or "test_novel".
        size: side of the square pictures in pixels.
        count: only the first so many; the whole split where omitted.

    Raises:
        ValueError: for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    return [_record(split, index, size) for index in range(SPLITS[split])[:count]]


def described(caption: str) -> Counter[tuple[str, str]]:
    """Counts the (colour, shape) pairs that a caption claims; other words claim nothing."""
    claims: Counter[tuple[str, str]] = Counter()
    for number, colour, shape in _CLAIM.findall(" ".join(caption.lower().split())):
        claims[colour, shape] += NUMBERS.get(number, 1)
    return claims


def _record(split: str, index: int, size: int) -> Record:
    rng = Random(f"{split}/{index}")
    picture, things = _draw(rng, _choose_pairs(rng, novel=split == "test_novel"), size)
    captions, phrases = zip(*_captions(rng, things))
    return Record(picture, captions, split, phrases, f"{split}-{index:04d}")


# --- the picture ----------------------------------------------------------------------------------


def _choose_pairs(rng: Random, *, novel: bool) -> list[tuple[str, str]]:
    """One to four (colour, shape) pairs, some of them repeated."""
    pairs = [rng.choice(HELD_OUT if novel else _PAIRS)]
    for _ in range(rng.choices((0, 1, 2, 3), (3, 4, 4, 2))[0]):
        pairs.append(rng.choice(pairs) if rng.random() < 0.15 else rng.choice(_PAIRS))
    rng.shuffle(pairs)
    return pairs


def _draw(rng: Random, pairs: list[tuple[str, str]], size: int) -> tuple[Image.Image, list[Thing]]:
    picture, things = _ground(rng, size), []
    kinds = sorted(rng.choices(list(SIZES), k=len(pairs)))  # the large find their places first
    for (colour, shape), kind, (x, y) in zip(pairs, kinds, _place(rng, kinds)):
        texture = rng.choices(TEXTURES, (2, 1, 1))[0]
        radius = round(SIZES[kind] * size)
        left, top = round(x * size) - radius, round(y * size) - radius
        mask = _silhouette(shape, radius, turn=math.radians(rng.uniform(-12, 12)))
        picture.paste(_surface(rng, colour, texture, radius), (left, top), mask)
        x0, y0, x1, y1 = mask.getbbox()
        box = ((left + x0) / size, (top + y0) / size, (left + x1) / size, (top + y1) / size)
        things.append(Thing(colour, shape, kind, texture, box))
    return picture, things


def _place(rng: Random, kinds: list[str]) -> list[tuple[float, float]]:
    """Centres such that the square around each object keeps its distance from the others."""
    while True:
        placed: list[tuple[float, float, float]] = []
        for radius in (SIZES[kind] for kind in kinds):
            low, high = radius + _GAP, 1 - radius - _GAP
            for _ in range(20):
                x, y = rng.uniform(low, high), rng.uniform(low, high)
                if all(max(abs(x - a), abs(y - b)) >= radius + r + _GAP for a, b, r in placed):
                    placed.append((x, y, radius))
                    break
            else:
                break  # no room: start over
        else:
            return [(x, y) for x, y, _ in placed]


def _ground(rng: Random, size: int) -> Image.Image:
    """A pale tint, or a soft passage between two, with or without faint noise."""
    first, second = rng.sample(_TINTS, 2)
    corners = Image.new("RGB", (2, 2), first)
    corners.paste(second, rng.choice(((2, 2, 2, 2), (0, 1, 2, 2), (1, 0, 2, 2), (1, 1, 2, 2))))
    ground = corners.resize((size, size), Image.Resampling.BICUBIC)
    if rng.random() < 0.4:
        noise = Image.frombytes("L", (size, size), rng.randbytes(size * size))
        noise = noise.point([value * 20 // 255 for value in range(256)]).convert("RGB")
        ground = ImageChops.add(ground, noise, offset=-14)
    return ground


def _silhouette(shape: str, radius: int, turn: float) -> Image.Image:
    """The shape as a smooth-edged mask, `2 * radius` pixels wide and high."""
    side = 2 * radius * _OVERSAMPLING
    mask = Image.new("L", (side, side))
    pen = ImageDraw.Draw(mask)

    def disc(share: float, fill: int) -> None:
        pen.circle((side / 2, side / 2), share * side / 2, fill)

    def polygon(*corners: tuple[float, float]) -> None:  # (angle, distance from the centre)
        spokes = [(turn + angle, side / 2 * r) for angle, r in corners]
        points = [(side / 2 + r * math.sin(a), side / 2 - r * math.cos(a)) for a, r in spokes]
        pen.polygon(points, 255)

    match shape:
        case "circle":
            disc(0.9, 255)
        case "ring":
            disc(0.95, 255)
            disc(0.52, 0)
        case "square":
            polygon(*((math.pi * (k / 2 + 0.25), 1) for k in range(4)))
        case "triangle":
            polygon(*((math.pi * k * 2 / 3, 1) for k in range(3)))
        case "star":
            polygon(*((math.pi * k / 5, 0.46 if k % 2 else 1) for k in range(10)))
        case "cross":
            for k in (0, math.pi / 2):
                polygon(*((k + a, 1) for a in (-0.33, 0.33, math.pi - 0.33, math.pi + 0.33)))
    return mask.reduce(_OVERSAMPLING)


def _surface(rng: Random, colour: str, texture: str, radius: int) -> Image.Image:
    """The square a silhouette is cut from: the colour, slightly varied, and its texture in pale."""
    full = [channel + rng.randint(-10, 9) for channel in COLOURS[colour]]
    pale = [round(0.3 * channel + 0.7 * 255) for channel in full]
    surface = Image.new("RGB", (2 * radius, 2 * radius), tuple(full))
    if texture == "plain":
        return surface
    side = 2 * radius * _OVERSAMPLING
    pattern = Image.new("L", (side, side))
    pen = ImageDraw.Draw(pattern)
    cells = round(3 + radius / 6)
    step = side / cells
    if texture == "striped":
        for k in range(-cells, cells):
            pen.line((k * step * 1.5, 0, k * step * 1.5 + side, side), 255, round(step * 0.45))
    else:
        for row, column in itertools.product(range(cells + 1), repeat=2):
            pen.circle(((column + row % 2 / 2) * step, row * step), step * 0.27, 255)
    surface.paste(tuple(pale), mask=pattern.reduce(_OVERSAMPLING))
    return surface


# --- the captions ---------------------------------------------------------------------------------


def _captions(rng: Random, things: list[Thing]) -> Iterator[tuple[str, tuple[Phrase, ...]]]:
    """Objects in one order; two captions say how neighbours lie, where that is clear."""
    plain = _groups(things, lambda thing: "")
    detail = rng.choice((lambda thing: thing.size + " ", lambda thing: thing.texture + " "))
    openers = rng.sample(_OPENERS, 5)
    yield _write(openers[0], *_listed(plain))
    yield _write(openers[1], *_listed(plain))
    yield _write(openers[2], *_listed(_groups(things, detail)))
    relations = list(_relations(plain))
    rng.shuffle(relations)
    for k in range(2):
        told = relations[k % len(relations)] if relations else (plain,)
        yield _write(openers[3 + k], *_listed(*told, link=rng.choice((" ", " that {be} "))))


def _groups(things: list[Thing], detail: Callable[[Thing], str]) -> list[Group]:
    """Objects of one description taken together, column by column, each from the top down."""
    members: dict[tuple[str, str, str], list[Thing]] = {}
    for thing in sorted(things, key=_column_and_height):
        members.setdefault((detail(thing), thing.colour, thing.shape), []).append(thing)
    groups = []
    for (adjective, colour, shape), group in members.items():
        plural = "" if len(group) == 1 else "es" if shape.endswith("s") else "s"
        words = f"{adjective}{colour} {shape}{plural}"
        article = "an" if words[0] in "aeiou" else "a"
        number = (article, "two", "three", "four")[len(group) - 1]
        groups.append(Group(f"{number} {words}", tuple(group)))
    return groups


def _column_and_height(thing: Thing) -> tuple[int, float]:
    """Which third of the picture's width the middle is in, and how far down it is."""
    x0, y0, x1, y1 = thing.box
    return int(3 * (x0 + x1) / 2), y0 + y1


def _relations(groups: list[Group]) -> Iterator[tuple[list[Group], int, str]]:
    """(groups, k, "above") where that clearly holds for all of group k and all of group k + 1.

    The groups are in their order; two alone may be told in either.
    """
    for order in (groups, groups[::-1]) if len(groups) == 2 else (groups,):
        for k, (first, second) in enumerate(itertools.pairwise(order)):
            pairs = [(a.box, b.box) for a in first.things for b in second.things]
            for axis, (before, after) in enumerate(_DIRECTIONS):
                if all(_precedes(a, b, axis) for a, b in pairs):
                    yield order, k, before
                if all(_precedes(b, a, axis) for a, b in pairs):
                    yield order, k, after


def _precedes(a: tuple[float, ...], b: tuple[float, ...], axis: int) -> bool:
    """Whether box `a` ends before `b` begins along an axis, and is mainly that way from it."""
    along, across = ((b[k] + b[k + 2] - a[k] - a[k + 2]) / 2 for k in (axis, 1 - axis))
    return b[axis] - a[axis + 2] >= _GAP and abs(across) <= 0.6 * along


def _listed(
    groups: list[Group], related: int | None = None, relation: str = "", *, link: str = ""
) -> Iterator[Group | str]:
    """The groups one after the other; group `related` has its relation to the next one told."""
    joints = [", "] * (len(groups) - 1)
    plain = [k for k in range(len(joints)) if k != related]
    if plain:
        joints[plain[-1]] = " and "
    if related is not None:
        joints[related] = f"{link}{relation} "
    for group, joint in itertools.zip_longest(groups, joints, fillvalue=""):
        yield group
        yield joint


def _write(*parts: str | Group) -> tuple[str, tuple[Phrase, ...]]:
    """Joins a caption; "{be}" agrees with the noun beside it; each noun becomes a phrase."""
    text, phrases = "", []
    for k, part in enumerate(parts):
        if isinstance(part, Group):
            boxes = tuple(thing.box for thing in part.things)
            phrases.append(Phrase(len(text), len(text) + len(part.noun), "object", boxes))
            text += part.noun
        elif "{be}" in part:
            noun = parts[k - 1] if part.startswith(" ") else parts[k + 1]
            text += part.format(be="are" if len(noun.things) > 1 else "is")
        else:
            text += part
    return text, tuple(phrases)
