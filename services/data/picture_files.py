"""The files of pictures, as Pillow reads them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

MOST_PIXELS = 80_000_000
MOST_OF_GROUP = 384 << 20
"""Bytes of the different pictures that a group's trajectories show beside their prompt's: a group travels, and lies in
Redis, as one piece, and Redis takes none above 512 MiB unless it is told to."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""That are read: of others Pillow starts programs, such as Ghostscript."""
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)
"""In EXIF, and those of its values with which width and height are swapped."""
BY_CAMERA = b"eXIf", b"adobe.xmp", b"Raw profile type"
"""In a PNG that may say how it was held."""
_BEGINNINGS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}

T = TypeVar("T")


class PictureError(ValueError):
    """A picture that cannot be read, or words that do not fit it; costs its prompt alone."""


def open_picture(picture: bytes) -> Any:
    """As an RGB image of Pillow, turned as its camera says. Raises `PictureError`."""
    from PIL import ImageOps

    image = _begun(picture)
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # its decoders raise anything
        raise PictureError(f"{told(picture)} cannot be read to its end: {error}") from error


def size_of(picture: bytes) -> tuple[int, int]:
    """Width and height, turned as its camera says; its pixels are not looked at. Raises `PictureError`."""
    image = _begun(picture)
    # Of a PNG Pillow reads all pixels first: what a camera has said may stand behind them.
    if image.format == "PNG" and not any(mark in picture for mark in BY_CAMERA):
        return (image.width, image.height)
    if image.format == "TIFF":  # which Pillow turns by itself
        width, height = open_picture(picture).size
        return width, height
    try:
        turned = image.getexif().get(ORIENTATION) in TURNED
    except Exception as error:  # its decoders raise anything
        raise PictureError(f"{told(picture)} cannot be read to its end: {error}") from error
    return (image.height, image.width) if turned else (image.width, image.height)


def open_pictures(pictures: Sequence[bytes]) -> Iterator[Any]:
    """As `open_picture`, of each of those that a prompt shows; what is wrong is said with its number."""
    return _each(open_picture, pictures)


def sizes_of(pictures: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """As `size_of`, and as `open_pictures` says what is wrong."""
    return _each(size_of, pictures)


def _each(read: Callable[[bytes], T], pictures: Sequence[bytes]) -> Iterator[T]:
    for number, picture in enumerate(pictures):
        try:
            yield read(picture)
        except PictureError as error:
            raise PictureError(f"picture {number}: {error}") from error


def scaled(picture: bytes, least: int | None, most: int | None) -> bytes:
    """``picture`` where it has no fewer pixels than ``least`` and no more than ``most`` (None: any), else one that has
    about as many, in its own proportions, as a PNG. Raises `PictureError`."""
    width, height = size_of(picture)
    wanted = max(width * height, least or 0)
    wanted = min(wanted, most or wanted)
    if wanted == width * height:
        return picture
    times = math.sqrt(wanted / (width * height))
    rounded = math.floor if times < 1 else math.ceil
    size = max(1, rounded(width * times)), max(1, rounded(height * times))
    open_picture(picture).resize(size).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def pixels_of(picture: bytes) -> int:
    """How many it says that it has; none is looked at. Raises `PictureError`."""
    image = _begun(picture)
    return int(image.width * image.height)


def check_picture(picture: bytes) -> None:
    """Raises `PictureError` where it does not begin as a picture does; its pixels are not looked at. Does nothing where
    Pillow is not installed."""
    try:
        _begun(picture)
    except ImportError:
        return


def blank_picture() -> bytes:
    """A small one, where none is at hand yet. Raises `ImportError` where Pillow is not installed."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    return file.getvalue()


def told(picture: bytes) -> str:
    """It in a few words, for people: ``PNG, 640 x 480, 31 kB``."""
    size = f"{len(picture) / 1000:,.0f} kB" if len(picture) >= 1000 else f"{len(picture)} bytes"
    try:
        image = _begun(picture)
    except (PictureError, ImportError):
        return f"a file of {size}"
    return f"{image.format}, {image.width} x {image.height}, {size}"


def format_of(picture: bytes) -> str:
    """As MIME types call the format that it begins like; empty: another one."""
    return next((each for begin, each in _BEGINNINGS.items() if picture.startswith(begin)), "")


def _begun(picture: bytes) -> Any:
    """As an image of Pillow of which no pixel is read yet. Raises `PictureError`."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(picture), formats=FORMATS)
    except UnidentifiedImageError:
        what = f"{len(picture)} bytes that are no picture (PNG, JPEG, WebP, GIF, BMP, TIFF)"
        raise PictureError(what) from None
    except Image.DecompressionBombError:
        raise PictureError(f"it has more than {MOST_PIXELS:,} pixels; make it smaller") from None
    except Exception as error:  # its readers raise anything
        raise PictureError(f"a file of {len(picture)} bytes cannot be read as a picture: {error}") from error
    if image.width * image.height > MOST_PIXELS:
        size = f"{image.width} x {image.height}"
        raise PictureError(f"it has more than {MOST_PIXELS:,} pixels ({size}); make it smaller")
    return image
