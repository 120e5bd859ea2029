"""What the demo works with: the bundled report (`REPORT`) and its small model (`demo.model`)."""

from importlib.resources import files

REPORT: str
"""An incident report of about 2,000 tokens, read from the package on first use."""


def __getattr__(name: str) -> str:
    if name != "REPORT":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    text = files(__name__).joinpath("report.txt").read_text(encoding="utf-8")
    globals()["REPORT"] = text
    return text
