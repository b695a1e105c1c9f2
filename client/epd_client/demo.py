"""The whole path, shown: a real server, the digits checkpoint, questions whose right answers are known.

The images are handwritten digits that the model never saw in training (`models/digits.py`).
"""

from __future__ import annotations

import base64
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from epd_client.client import Answer, Client
from epd_client.launch import Server
from epd_client.tensors import encode_image
from epd_client.timeline import chrome_trace, overview, picture

SEED = 0
MAX_TOKENS = 16
TRACE = "build/demo-trace.json"  # in the repository

# The model was trained on one task: images, then the question. What it answers to anything else is no reading, but it
# is still exactly what `AutoModelForImageTextToText.generate` answers in float32, greedily (`tests/unit/test_demo.py`
# checks these literals against it).
TEXT_ONLY = "How many images are there?"
TEXT_ONLY_ANSWER = "126119281144"  # max_new_tokens=12, min_new_tokens=12
TEXT_BETWEEN = ", "
TEXT_BETWEEN_ANSWER = "5284282"  # to the first eight held-out digits, 58123482


@dataclass(frozen=True)
class Case:
    """One question: arguments of `Client.generate` and the right answer."""

    title: str
    arguments: Mapping[str, Any]
    right: str


class Cases:
    """Makes questions from held-out digits, always the same. Raises FileNotFoundError outside the repository."""

    def __init__(self, root: Path) -> None:
        if not (root / "models" / "digits.py").is_file():
            raise FileNotFoundError(f"{root} is not the project's repository: it has no models/digits.py")
        sys.path.insert(0, str(root))
        self._digits = importlib.import_module("models.digits")
        self._scans, self._labels = self._digits.heldout()
        self._random = np.random.default_rng(SEED)

    def text_only(self) -> Case:
        """No image at all."""
        sampling = {"max_tokens": len(TEXT_ONLY_ANSWER), "min_tokens": len(TEXT_ONLY_ANSWER)}
        return Case("text only", {"text": TEXT_ONLY, "sampling": sampling}, TEXT_ONLY_ANSWER)

    def images(self, count: int) -> Case:
        """`count` images back to back, then the question."""
        chosen = self._choose(count)
        title = "one image" if count == 1 else f"{count} images back to back"
        return self._case(title, [self._digits.render(self._scans[i]) for i in chosen], chosen)

    def row(self, count: int, px: int = 56) -> Case:
        """One image with `count` digits in a row, `px` pixels high."""
        chosen = self._choose(count)
        return self._case(f"a row of {count} digits, {px} px", [self._digits.row(self._scans[chosen], px)], chosen)

    def text_between(self) -> Case:
        """Eight images as parts of a chat message, with text between them."""
        content: list[dict[str, Any]] = []
        for scan in self._scans[:8]:
            data = base64.b64encode(encode_image(self._digits.render(scan))).decode()
            content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
            content.append({"type": "text", "text": TEXT_BETWEEN})
        content[-1] = {"type": "text", "text": self._digits.QUESTION}
        arguments = {"messages": [{"role": "user", "content": content}], "sampling": {"max_tokens": MAX_TOKENS}}
        return Case("eight images with text between", arguments, TEXT_BETWEEN_ANSWER)

    def twelve(self) -> list[Case]:
        """Twelve different questions, to be asked at once."""
        few = [self.images(count) for count in (1, 2, 3, 5, 8)]
        rows = [self.row(count) for count in (2, 4, 6, 8)] + [self.row(3, px=112)]
        return [*few, *rows, self.text_between(), self.text_only()]

    def _case(self, title: str, images: Sequence[Image.Image], chosen: Sequence[int]) -> Case:
        arguments = {"text": self._digits.QUESTION, "images": images, "sampling": {"max_tokens": MAX_TOKENS}}
        return Case(title, arguments, self._right(chosen))

    def _choose(self, count: int) -> list[int]:
        return [int(i) for i in self._random.choice(len(self._labels), count, replace=False)]

    def _right(self, chosen: Sequence[int]) -> str:
        return "".join(str(self._labels[i]) for i in chosen)


def run(root: Path, config_name: str, console: Console) -> int:
    """Start the server, ask, print, stop the server. Returns how many answers were wrong."""
    cases = Cases(root)
    done: list[tuple[Case, Answer]] = []
    console.print(f"starting tritonserver with configuration '{config_name}' of each model")
    with Server(root / "model_repository", config_name=config_name) as server:
        console.print(f"ready: gRPC {server.grpc}, HTTP {server.http}\n")
        with Client(server.grpc) as client:
            one_by_one = [cases.text_only(), cases.images(1), cases.row(8), cases.text_between(), cases.images(8)]
            for case in one_by_one:
                done.append((case, _ask_aloud(client, case, console)))
            done += _ask_at_once(client, cases.twelve(), console)
    timelines = {f"{number} {case.title}": answer.timeline for number, (case, answer) in enumerate(done, 1)}
    trace = root / TRACE
    trace.parent.mkdir(exist_ok=True)
    trace.write_text(json.dumps(chrome_trace({name: line for name, line in timelines.items() if line})))
    console.print(f"trace for https://ui.perfetto.dev or chrome://tracing: {TRACE}")
    right = sum(answer.text == case.right for case, answer in done)
    console.print(f"demo: {right} of {len(done)} answers right")
    return len(done) - right


def _ask_aloud(client: Client, case: Case, console: Console) -> Answer:
    """Print the answer as it streams in, then how it came about."""
    console.print(f"[bold]{case.title}[/bold]")
    console.print("  answer ", end="")
    answer = client.ask(**case.arguments, timeline=True, on_text=lambda text: console.print(text, end=""))
    console.print(f"   right answer {case.right}   {_verdict(case, answer)}   TTFT {answer.ttft_s * 1e3:.0f} ms")
    if answer.timeline:
        console.print(picture(answer.timeline, console.width))
    console.print()
    return answer


def _ask_at_once(client: Client, cases: Sequence[Case], console: Console) -> list[tuple[Case, Answer]]:
    """Ask all questions at the same time."""
    console.print(f"[bold]{len(cases)} requests at once[/bold]")
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: client.ask(**case.arguments, timeline=True), cases))
    table = Table("request", "answer", "right answer", "", "TTFT", box=None, pad_edge=False)
    for case, answer in zip(cases, answers, strict=True):
        ttft = f"{answer.ttft_s * 1e3:.0f} ms"
        table.add_row(case.title, answer.text, case.right, _verdict(case, answer), ttft)
    console.print(table)
    timelines = {case.title: answer.timeline for case, answer in zip(cases, answers, strict=True) if answer.timeline}
    console.print(overview(timelines, console.width))
    console.print()
    return list(zip(cases, answers, strict=True))


def _verdict(case: Case, answer: Answer) -> str:
    return "[green]right[/green]" if answer.text == case.right else "[red]WRONG[/red]"
