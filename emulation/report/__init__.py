"""Forms of one attribution: Markdown for a terminal, JSON for machines, one HTML file for people.

Only `to_html` needs matplotlib (the extra `report`), and imports it when called.
"""

from emulation.report.html import to_html
from emulation.report.json_report import to_json
from emulation.report.markdown import to_markdown

__all__ = ["to_html", "to_json", "to_markdown"]
