"""The report of a comparison: what the records of its cells say, as table, figures and page."""

from .conclusions import recommend
from .figures import figures
from .formatting import counted, listed
from .page import markdown, table, write_report
from .results import TOLERANCE

__all__ = [
    "TOLERANCE",
    "counted",
    "figures",
    "listed",
    "markdown",
    "recommend",
    "table",
    "write_report",
]
