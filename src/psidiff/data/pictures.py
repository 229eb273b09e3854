"""One picture in a file, opened within the bounds that all files have."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..checksums import in_short
from ..limits import check_limit

_FORMATS = ("PNG", "JPEG", "GIF", "BMP")  # Pillow knows some that start other programs


@contextmanager
def picture(data: bytes, name: Any) -> Iterator[Any]:
    """The bytes of a picture as an image of Pillow; what fails inside is said of `name`."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError(
            "reading PNG or JPEG needs Pillow: pip install 'psidiff[images]'"
        ) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # there is our bound
        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
                size = math.prod(opened.size)
                check_limit("pixels", size, name, f"has {size:,} pixels")
                yield opened
        except MemoryError:
            raise
        except Exception as error:  # bytes that are no picture fail in every way there is
            if isinstance(error, ValueError) and str(error).startswith(str(name)):
                raise
            said = f"{name} cannot be read as an image"
            raise ValueError(f"{said} ({type(error).__name__}: {in_short(error)})") from error
