import io

import numpy as np
import pytest
from epd_client.client import Client, EpdError
from epd_client.errors import as_epd_error
from epd_client.tensors import encode_image
from PIL import Image
from tritonclient.utils import InferenceServerException

IMAGE = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))


def test_a_pil_image_is_sent_without_loss() -> None:
    sent = Image.open(io.BytesIO(encode_image(IMAGE)))
    assert sent.format == "PNG"
    assert np.array_equal(np.asarray(sent), np.asarray(IMAGE))


def test_a_file_and_bytes_are_sent_as_they_are(tmp_path) -> None:
    path = tmp_path / "a.jpg"
    IMAGE.save(path, "JPEG")
    assert encode_image(path) == path.read_bytes() == encode_image(str(path))
    assert encode_image(b"not an image: the server's business") == b"not an image: the server's business"


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"cannot read the image /nowhere/a\.png: No such file"):
        encode_image("/nowhere/a.png")


@pytest.mark.parametrize("arguments", [{}, {"text": "a", "messages": [{"role": "user", "content": "a"}]}])
def test_exactly_one_of_text_and_messages(arguments) -> None:
    with pytest.raises(ValueError, match="either text or messages"):
        Client("localhost:1").generate(**arguments)


def test_a_single_image_is_a_list_of_one() -> None:
    with pytest.raises(ValueError, match="images is a list"):
        Client("localhost:1").generate("a", images="a.png")


def test_no_server_is_an_error_that_says_how_to_start_one() -> None:
    with pytest.raises(EpdError, match=r"no server answers at 127\.0\.0\.1:1 .*`epd serve`") as error:
        Client("127.0.0.1:1", timeout_s=20).ask("hello")
    assert error.value.code == "UNAVAILABLE"


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(EpdError, match=r"no server answers at http://localhost:1 .*--url HOST:PORT"):
        Client("http://localhost:1", timeout_s=20).ask("hello")


@pytest.mark.parametrize(
    ("message", "code"),
    [("CANCELLED", "UNAVAILABLE"), ("Locally cancelled by application!", "CANCELLED")],
    ids=["by the server", "by the client"],
)
def test_a_call_that_the_server_cancels_may_be_sent_again(message: str, code: str) -> None:
    assert as_epd_error(InferenceServerException(message, status="StatusCode.CANCELLED"), "localhost:1").code == code


@pytest.mark.parametrize("message", ["Server not ready", "Server exiting"])
def test_what_triton_says_of_a_server_that_stops_is_no_fault_of_a_model(message: str) -> None:
    error = as_epd_error(InferenceServerException(message), "localhost:1")
    assert (error.code, str(error)) == (
        "UNAVAILABLE",
        f"the server is stopping ({message}); send the request again later",
    )
