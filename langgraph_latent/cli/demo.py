"""`langgraph-latent demo`: the demo's options, its model made ready, and where its result goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from langgraph_latent.cli.terminal import AsJson, OutputError, silence_loading, terminal


def demo(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER_OR_ID",
            help="A folder made by save_pretrained(), or a hub id. Default: SmolLM2-135M, made ready once.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="How much each agent may write.")] = 48,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads. Default: OMP_NUM_THREADS, else what a short measurement finds best."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", dir_okay=False, help="Append every event of both runs to this file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Three agents over one report, with text edges and with latent edges: what each costs, and both answers."""
    from langgraph_latent.cli.demo_view import View, headline, print_result

    _check_writable(trace)
    console = terminal(stderr=as_json)
    with View(console) as view:
        if model is None:
            from langgraph_latent.demo.model import demo_model

            model = str(demo_model(view.stage))
        view.stage("importing torch")
        import torch

        from langgraph_latent.demo.run import run_demo
        from langgraph_latent.demo.threads import fastest_num_threads

        silence_loading()
        num_threads = threads or fastest_num_threads()
        torch.set_num_threads(num_threads)
        console.print(headline(model, num_threads))
        stats = run_demo(model, max_tokens=max_tokens, trace=trace, watcher=view)
    if as_json:
        print(json.dumps({"threads": num_threads, **stats.to_dict()}, indent=2))
    else:
        print_result(console, stats)
        if trace:
            console.print(f"\nEvery event is in {trace}: langgraph-latent trace {trace}", soft_wrap=True)


def _check_writable(trace: Path | None) -> None:
    """Find out before the model loads."""
    if trace is not None:
        try:
            trace.open("a").close()
        except OSError as error:
            raise OutputError(f"the trace can't be written: {error}") from error
