"""The `epd` command."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from epd_client import control, demo, measure, simulate
from epd_client.client import Client, EpdError
from epd_client.configure import TopologyError, parse_topology, write_repository
from epd_client.install import InstallError
from epd_client.launch import READY_TIMEOUT_S, LaunchError, Server, describe_exit
from epd_client.timeline import picture

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)

DRAIN_S = 20.0  # for open requests when `epd serve` is told to stop
UNLOAD_S = 10.0  # then for the workers

Url = Annotated[str, typer.Option(help="The server's gRPC address.")]
Repository = Annotated[Path, typer.Option(help="Model repository directory.")]
ConfigName = Annotated[
    str, typer.Option(help="Which configs/NAME.pbtxt of each model: cpu, 1gpu; '' for config.pbtxt (a GPU a stage).")
]


@app.command()
def serve(
    repository: Repository = Path("model_repository"),
    config_name: ConfigName = "cpu",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option()] = 8000,
    grpc_port: Annotated[int, typer.Option()] = 8001,
    metrics_port: Annotated[int, typer.Option()] = 8002,
    log: Annotated[
        Path | None,
        typer.Option(help="File for the server's log; by default a temporary one, which an orderly stop removes."),
    ] = None,
    ready_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds for all models to load; a large checkpoint may need more.")
    ] = READY_TIMEOUT_S,
) -> None:
    """Start the server and leave it running until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = Server(
        repository,
        config_name=config_name or None,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        log=log,
        ready_timeout_s=ready_timeout,
    )
    try:
        with console.status("starting tritonserver"):
            server.start()
        console.print(f"HTTP {server.http}   gRPC {server.grpc}   metrics {server.metrics}/metrics")
        console.print(
            f"log {server.log}" + ("" if log else " (removed after an orderly stop; --log FILE keeps it)"),
            soft_wrap=True,
        )
        console.print("Ctrl-C or SIGTERM stops the server")
        while server.running():
            time.sleep(0.2)
        _fail(f"tritonserver ended by itself, {describe_exit(server.stop())}; log: {server.log}")
    except KeyboardInterrupt:
        if server.running():  # else it was still starting
            with contextlib.suppress(EpdError, KeyboardInterrupt):  # told again, or a server that cannot
                console.print(f"stopping when open requests have ended, in {DRAIN_S:.0f} s at most; Ctrl-C: now")
                if control.drain(server.grpc, DRAIN_S):
                    control.unload_workers(server.grpc, UNLOAD_S)
        for again in (signal.SIGINT, signal.SIGTERM):  # would leave the stopping half done
            signal.signal(again, signal.SIG_IGN)
        console.print("stopping")
        if status := server.stop():
            _fail(f"tritonserver did not stop in good order: it ended {describe_exit(status)}; log: {server.log}")
    except (InstallError, LaunchError) as error:
        _fail(str(error))
    finally:
        server.stop()


@app.command()
def chat(
    question: str,
    image: Annotated[list[Path] | None, typer.Option(help="Image file; may be given several times.")] = None,
    url: Url = "localhost:8001",
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    timeline: Annotated[bool, typer.Option(help="Show what ran when.")] = False,
) -> None:
    """Ask about images and print the answer as it comes."""
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    content = [*({"type": "image"} for _ in image or ()), {"type": "text", "text": question}]
    last = None
    try:
        with Client(url) as client:
            messages = [{"role": "user", "content": content}]
            for chunk in client.generate(messages=messages, images=image or (), sampling=sampling, timeline=timeline):
                console.print(chunk.text, end="", markup=False)
                last = chunk
    except (EpdError, ValueError) as error:
        if last:
            console.print()
        _fail(str(error))
    console.print()
    if last and last.timeline:
        console.print(picture(last.timeline, console.width))


@app.command()
def health(url: Url = "localhost:8001") -> None:
    """Check the server, each model, and a request through every stage; exit status 1 if something is wrong."""
    checks = control.health(url)
    for check in checks:
        console.print("[green]ok    [/green]" if check.ok else "[red]FAILED[/red]", end=" ")
        console.print(f"{check.name}: {check.detail}", markup=False, soft_wrap=True)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


@app.command()
def drain(
    url: Url = "localhost:8001",
    timeout: Annotated[float, typer.Option(min=0.0, help="Most seconds to wait for open requests.")] = 60.0,
) -> None:
    """Before a stop: refuse new requests and wait until open ones end (`epd reload epd_ensemble` undoes it)."""
    try:
        with console.status("waiting for the end of open requests"):
            ended = control.drain(url, timeout)
    except EpdError as error:
        _fail(str(error))
    if not ended:
        _fail(f"requests are still open after {timeout:g} s; no new ones are taken in")
    console.print("all requests have ended; no new ones are taken in")


@app.command()
def reload(model: str, url: Url = "localhost:8001") -> None:
    """Unload and load a model, which brings back one whose process died; a worker takes part in requests then."""
    try:
        with console.status(f"reloading {model}"):
            took = control.reload(url, model)
    except EpdError as error:
        _fail(str(error))
    console.print(f"{model} is back ({took:.1f} s)")


@app.command()
def configure(
    target: Annotated[Path, typer.Argument(help="Directory for the new model repository.")],
    topology: Annotated[str, typer.Option(help="E, P, D alone or together, e.g. 2E1P2D, 1E1PD, 1EPD.")],
    devices: Annotated[
        str, typer.Option(help="One an instance, e.g. cuda:0,cuda:0,cuda:1; default cpu:0,cpu:1,...")
    ] = "",
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages of each language instance.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each stage.")] = 1,
    emulate: Annotated[Path | None, typer.Option(help="Profile whose costs stand in for computing.")] = None,
    source: Repository = Path("model_repository"),
) -> None:
    """Write a model repository for another topology; the code is linked from the project's own."""
    chosen = [device for device in devices.split(",") if device]
    try:
        placements = parse_topology(topology, chosen, stages)
        write_repository(source, target, placements, threads, emulate)
    except (TopologyError, OSError) as error:
        _fail(str(error))
    for placement in placements:
        console.print(f"{placement.name}: {', '.join(placement.roles)} on {placement.device}")
    console.print(f"start it: epd serve --repository {target} --config-name ''")


@app.command(name="demo")
def run_demo(
    root: Annotated[Path, typer.Option(help="The project's repository.")] = Path(),
    config_name: ConfigName = "cpu",
) -> None:
    """Start a server, ask questions whose answers are known, stop it; exit status 1 if an answer is wrong."""
    try:
        wrong = demo.run(root.resolve(), config_name, console)
    except (EpdError, InstallError, LaunchError, FileNotFoundError) as error:
        _fail(str(error))
    if wrong:
        raise typer.Exit(1)


app.command()(measure.bench)
app.command()(measure.plot)
app.command()(simulate.simulate)
app.command()(measure.profile)


def _fail(message: str) -> NoReturn:
    Console(stderr=True, highlight=False).print(f"error: {message}", markup=False, style="red", soft_wrap=True)
    raise typer.Exit(1)
