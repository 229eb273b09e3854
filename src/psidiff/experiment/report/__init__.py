"""The report of a comparison: what the records of its cells say, as table, figures and page."""

from .conclusions import recommend
from .figures import figures
from .formatting import counted, listed
from .page import write_report
from .results import TOLERANCE
from .tables import markdown, table

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
