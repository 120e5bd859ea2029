"""The benchmark's rows by name, in the order in which they are shown. A row is a function from `Bench` to `Result`."""

from __future__ import annotations

from benchmarks.cli import Row
from benchmarks.rows import (
    chain,
    decode,
    detokenize,
    equal_chain,
    export,
    first_token,
    handover,
    merge,
    shared_bytes,
    text_handover,
)

ROWS: dict[str, Row] = {
    "handover": handover.run,
    "first-token": first_token.run,
    "text-handover": text_handover.run,
    "chain": chain.run,
    "equal-chain": equal_chain.run,
    "decode": decode.run,
    "detokenize": detokenize.run,
    "bytes": shared_bytes.run,
    "export": export.run,
    "merge": merge.run,
}
