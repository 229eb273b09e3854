"""The report of a comparison: what the records of its cells say, as table, figures and page."""

from .cells import TOLERANCE
from .drawing import figures
from .page import write_report
from .sentences import recommend
from .tables import markdown, table

__all__ = ["TOLERANCE", "figures", "markdown", "recommend", "table", "write_report"]
