"""Find `tritonserver` and prepare what it needs to run the Python backend with this environment's Python.

Two installations work. One is NVIDIA's container, where `tritonserver` is on PATH and its backends are in place. The
other is the `nvidia-pytriton` wheel, which carries the server, the Python backend and one stub a Python version, but
in places where the server does not look: `assemble_backend` puts them together.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class InstallError(RuntimeError):
    """Something that the server needs is missing; the message names it and says how to get it."""


@dataclass(frozen=True)
class Installation:
    """One usable Triton server."""

    executable: Path
    wheel: Path | None  # site-packages directory of nvidia-pytriton, None for an installation on PATH

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with what the server and its Python stubs need.

        The stub takes Python's home, and so its packages, from the first `python3` on PATH.
        """
        env = dict(base)
        env["PATH"] = _prepend(Path(sys.executable).parent, env.get("PATH"))
        env.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads of several stubs starve one another
        if self.wheel is not None:
            libraries = _prepend(find_libpython().parent, env.get("LD_LIBRARY_PATH"))
            env["LD_LIBRARY_PATH"] = _prepend(self.wheel / "nvidia_pytriton.libs", libraries)
        return env


def find_tritonserver() -> Installation:
    """The `tritonserver` on PATH, else the one inside the nvidia-pytriton wheel. Raises InstallError."""
    if on_path := shutil.which("tritonserver"):
        return Installation(Path(on_path), wheel=None)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise InstallError(
            "no tritonserver: none on PATH, and the nvidia-pytriton wheel that carries one is not installed here; "
            f"run `{sys.executable} -m pip install 'triton-epd[triton]'`, or work inside Triton's container "
            "(nvcr.io/nvidia/tritonserver)"
        )
    package = Path(spec.submodule_search_locations[0])
    executable = package / "tritonserver" / "bin" / "tritonserver"
    if not executable.is_file():
        raise InstallError(f"{executable} is missing: the nvidia-pytriton wheel carries a server for Linux only")
    return Installation(executable, wheel=package.parent)


def find_libpython() -> Path:
    """The shared library of the running Python, which the stub links to. Raises InstallError."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = f"libpython{version}.so.1.0"
    places = [
        sysconfig.get_config_var("LIBDIR"),
        str(Path(sys.base_prefix) / "lib"),
        f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}",
    ]
    for place in places:
        if place and (Path(place) / name).exists():
            return Path(place) / name
    raise InstallError(
        f"{name} not found in {', '.join(filter(None, places))}: Triton's Python backend needs a Python built as a "
        f"shared library. Debian and Ubuntu: `apt-get install libpython{version}`; pyenv: "
        f"`PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install {version}`; uv and conda Pythons have it"
    )


def assemble_backend(wheel: Path, directory: Path) -> Path:
    """Link the wheel's Python backend and the stub of the running Python into `directory`/python.

    Returns what `--backend-directory` takes. Raises InstallError.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    server = wheel / "pytriton" / "tritonserver"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        have = sorted(path.name for path in stub.parent.parent.glob("*"))
        raise InstallError(f"nvidia-pytriton has no stub for Python {version}, only for {', '.join(have) or 'none'}")
    target = directory / "python"
    target.mkdir(parents=True)
    for source in (
        server / "backends" / "python" / "libtriton_python.so",
        server / "backends" / "python" / "triton_python_backend_utils.py",
        stub,
    ):
        (target / source.name).symlink_to(source)
    return directory


def _prepend(directory: Path, path: str | None) -> str:
    return f"{directory}{os.pathsep}{path}" if path else str(directory)
