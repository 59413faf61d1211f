"""Write what is made from the code and kept in the repository: the JSON schema, and the page of codes.

Usage: .venv/bin/python scripts/generated.py
"""

from pathlib import Path

import parity
from parity.report.schema import FILE, as_shipped

PAGE = Path(__file__).resolve().parent.parent / "docs" / "codes.md"


if __name__ == "__main__":
    FILE.write_text(as_shipped(), encoding="utf-8")
    PAGE.write_text(parity.codes_page(), encoding="utf-8")
