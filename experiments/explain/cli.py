"""The command `explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape

from cuattn.machine import DeviceError
from experiments.console import fail
from experiments.explain import asking
from experiments.run_cli import KernelPaths


def register(app: typer.Typer, console: Console) -> None:
    """Add the command to the application."""

    @app.command("explain")
    def command(
        kernel: Annotated[str, typer.Argument(help="A kernel's name, such as flash.")],
        shape: Annotated[
            str, typer.Option("--shape", help=f"Pairs such as M=128,N=256. Defaults: {asking.USAGE}.")
        ] = "",
        dtype: Annotated[str, typer.Option("--dtype", help="Element type.")] = asking.DTYPE,
        causal: Annotated[
            Optional[bool],
            typer.Option("--causal/--full", help="The mask of a prefill kernel; full if not given."),
        ] = None,
        constant: Annotated[
            Optional[list[str]], typer.Option("--constant", help="NAME=VALUE: set a tunable, as suites do.")
        ] = None,
        paths: KernelPaths = None,
        block: Annotated[int, typer.Option("--block", help="The block whose timeline is shown.")] = 0,
        wait: Annotated[
            float, typer.Option("--wait", help="Estimated seconds it may take.")
        ] = asking.WAIT_S,
        out: Annotated[
            Optional[Path],
            typer.Option("--out", help="Also save explain.json and timeline.html in this folder."),
        ] = None,
    ) -> None:
        """Run a kernel once on the CPU machine and say, line by line, what it did."""
        from experiments.explain import explaining, printing  # here, because Altair takes its time

        request = explaining.Request(
            kernel, shape, dtype, causal, tuple(constant or ()), tuple(paths or ()), block, wait
        )
        try:
            document = explaining.explain(request)
        except DeviceError as error:
            fail(error)
            raise SystemExit(1) from None
        printing.show(console, document)
        if out is None:
            again = explaining.out_of(document, f"runs/explain-{document['kernel']}")
            console.print(f"\nTo keep it for the dashboard: {escape(again)}", highlight=False, soft_wrap=True)
        else:
            for path in explaining.save(document, out):
                console.print(f"Saved: {escape(str(path))}", highlight=False, soft_wrap=True)
        if not explaining.holds(document):
            raise SystemExit(1)
