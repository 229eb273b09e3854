"""The report of a comparison: what the records of its cells say, as table, figures and page."""

from .cells import TOLERANCE
from .drawing import figures
from .page import write_report
from .sentences import recommend
from .tables import markdown, table
from .words import counted, listed

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
