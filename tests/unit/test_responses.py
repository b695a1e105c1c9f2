import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from epd_orchestrator.responses import Options, ResponseBuilder
from epd_orchestrator.session import Progress, Update
from epd_scheduler.request import EndEvent, RefusedError, Span, TokenEvent
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[2] / "models/digits-vl/tokenizer.json"))
A, B = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("b")
PROGRESS = Progress("id-7", 3, 10.0, prompt="Say it. ", input_tokens=5)
SPANS = (Span("prefill", 10.5, 11.0, "prefill", {"first": 0, "tokens": 5}),)
UPDATES = [
    Update(PROGRESS, "a", (TokenEvent(1, A, -0.25, ((A, -0.25), (B, -1.5))),)),
    Update(PROGRESS, "b", (TokenEvent(1, B, -0.5, ((A, -0.25),)),)),
    Update(PROGRESS, "", end=EndEvent(1, "length", "", SPANS)),
]
ALL = {name: True for name in Options.__struct_fields__ if name.startswith("return_")}


def responses(**options: Any) -> list[dict[str, Any]]:
    builder = ResponseBuilder(Options(**options), TOKENIZER)
    made = [outputs for update in UPDATES if (outputs := builder.add(update)) is not None]
    return [{name: value.tolist()[0] for name, value in outputs.items()} for outputs in made]


def test_one_response_repeats_the_prompt_unless_told_not_to() -> None:
    assert responses() == [{"text_output": b"Say it. ab"}]
    assert responses(exclude_input_in_output=True) == [{"text_output": b"ab"}]


def test_a_stream_has_a_response_for_each_update_and_no_prompt() -> None:
    assert responses(stream=True) == [{"text_output": b"a"}, {"text_output": b"b"}, {"text_output": b""}]


def test_a_stream_cannot_repeat_the_prompt() -> None:
    Options(stream=True, exclude_input_in_output=True).check()
    with pytest.raises(RefusedError, match="exclude_input_in_output"):
        Options(stream=True, exclude_input_in_output=False).check()


def test_all_outputs_of_one_response() -> None:
    (got,) = responses(**ALL)
    assert {name: got[name] for name in got if name not in ("logprobs", "timeline")} == {
        "text_output": b"Say it. ab",
        "finish_reason": b"length",
        "cumulative_logprob": -0.75,
        "num_input_tokens": 5,
        "num_output_tokens": 2,
    }
    assert json.loads(got["logprobs"]) == [
        {
            str(A): {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
            str(B): {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
        },
        {
            str(B): {"logprob": -0.5, "rank": None, "decoded_token": "b"},
            str(A): {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
        },
    ]
    assert json.loads(got["timeline"]) == {
        "id": "id-7",
        "priority": 3,
        "class": "sand",
        "arrival": 10.0,
        "end": 11.0,
        "spans": [
            {
                "name": "prefill",
                "start": 10.5,
                "end": 11.0,
                "instance": "prefill",
                "detail": {"first": 0, "tokens": 5},
            }
        ],
    }


def test_in_a_stream_counts_are_of_the_response_and_the_rest_comes_with_the_last() -> None:
    got = responses(stream=True, **ALL)
    assert [r["num_output_tokens"] for r in got] == [1, 1, 0]
    assert [r["num_input_tokens"] for r in got] == [5, 5, 5]
    assert [r["cumulative_logprob"] for r in got] == [-0.25, -0.75, -0.75]
    assert [r["finish_reason"] for r in got] == [b"None", b"None", b"length"]
    assert [len(json.loads(r["logprobs"])) for r in got] == [1, 1, 0]
    assert ["timeline" in r for r in got] == [False, False, True]


def test_types_are_those_of_the_configuration() -> None:
    builder = ResponseBuilder(Options(**ALL), TOKENIZER)
    outputs = next(filter(None, map(builder.add, UPDATES)))
    assert {name: (value.dtype, value.shape) for name, value in outputs.items()} == {
        "text_output": (np.dtype(object), (1,)),
        "finish_reason": (np.dtype(object), (1,)),
        "cumulative_logprob": (np.dtype(np.float32), (1,)),
        "logprobs": (np.dtype(object), (1,)),
        "num_input_tokens": (np.dtype(np.uint32), (1,)),
        "num_output_tokens": (np.dtype(np.uint32), (1,)),
        "timeline": (np.dtype(object), (1,)),
    }
