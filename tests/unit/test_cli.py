from epd_client.cli import app
from typer.testing import CliRunner

NOWHERE = ["--url", "127.0.0.1:1"]


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_help_names_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("serve", "chat", "health", "reload", "demo"):
        assert command in result.output


def test_health_without_a_server_fails_and_says_what_to_do() -> None:
    result = run("health", *NOWHERE)
    assert result.exit_code == 1
    assert "FAILED server: no server answers at 127.0.0.1:1" in result.output
    assert "start one with `epd serve`, or name one elsewhere with `--url HOST:PORT`" in result.output


def test_chat_without_a_server_fails_without_a_traceback() -> None:
    result = run("chat", "hello", *NOWHERE)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: no server answers")
    assert "Traceback" not in result.output


def test_chat_names_a_missing_image() -> None:
    result = run("chat", "hello", "--image", "/nowhere/a.png", *NOWHERE)
    assert result.exit_code == 1
    assert "cannot read the image /nowhere/a.png" in result.output


def test_chat_names_a_file_that_is_no_image(tmp_path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not an image")
    result = run("chat", "hello", "--image", str(path), *NOWHERE)
    assert result.exit_code == 1
    assert result.stderr == f"error: {path} is not an image; name a PNG, JPEG, WEBP, GIF or BMP file\n"


def test_reload_without_a_server_fails() -> None:
    result = run("reload", "prefill", *NOWHERE)
    assert result.exit_code == 1
    assert "no server answers" in result.output


def test_serve_names_a_missing_repository(tmp_path) -> None:
    result = run("serve", "--repository", str(tmp_path / "missing"))
    assert result.exit_code == 1
    assert "no model repository at" in result.output


def test_demo_outside_the_repository_says_so(tmp_path) -> None:
    result = run("demo", "--root", str(tmp_path))
    assert result.exit_code == 1
    assert "is not the project's repository" in result.output


def test_bench_says_what_is_wrong_and_nothing_else() -> None:
    result = run("bench", "--workload", "/nowhere.yaml", *NOWHERE)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: /nowhere.yaml: ")
    result = run("bench", *NOWHERE)
    assert result.stdout == ""
    assert result.stderr.startswith("error: no server answers")
