"""Arenas shared by real processes: made once, found by all, gone with the last, whoever is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import uuid

import msgspec
import pytest
import torch
from epd_backend import arena, arena_cuda
from epd_backend.arena import ArenaError, ArenaMap
from epd_backend.shared_file import DIRECTORY, SharedFile, remove_stale
from epd_scheduler.protocol import ArenaInfo

USER = """
import sys
import torch
from epd_backend import arena
mine = arena.join(sys.argv[1], "cpu:0", "embedding", (4, 2, 3), torch.float32)
for line in sys.stdin:
    command, _, value = line.strip().partition(" ")
    if command == "write":
        mine.tensor[1] = float(value)
    elif command == "close":
        mine.close()
    print(mine.info.id, mine.tensor.flatten()[6:7].tolist(), flush=True)
"""

RACER = """
import secrets
import sys
from epd_backend.shared_file import SharedFile
for _ in range(300):
    mine = SharedFile.join(sys.argv[1], lambda fd: secrets.token_bytes(8))
    other = SharedFile.open_existing(sys.argv[1])
    assert mine.header == other.header, "two files of one name"
    mine.close()
    other.close()
"""


class User:
    """Another process that uses the arena `cpu:0 embedding` of a namespace."""

    def __init__(self, namespace: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, namespace], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def do(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], 60)[0], f"no answer to '{command}'"
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture
def namespace():
    name = f"test{uuid.uuid4().hex[:8]}"
    yield name
    left = [entry for entry in os.listdir(DIRECTORY) if name in entry]
    for entry in left:
        os.unlink(DIRECTORY / entry)
    assert left == []


def join(namespace: str, **changed):
    described = {"device": "cpu:0", "kind": "embedding", "shape": (4, 2, 3), "dtype": torch.float32} | changed
    return arena.join(namespace, **described)


def test_processes_see_each_others_writes(namespace):
    mine = join(namespace)
    assert mine.tensor.shape == (4, 2, 3)
    assert mine.tensor.count_nonzero() == 0
    other = User(namespace)
    assert other.do("write 2.5").split()[0] == mine.info.id
    assert mine.tensor[1].eq(2.5).all()
    mine.tensor[1] = 7.0
    assert other.do("look").split()[1] == "[7.0]"
    other.end()
    mine.close()


def test_the_maker_may_be_killed_first_and_a_successor_finds_the_same_arena(namespace):
    maker = User(namespace)
    made = maker.do("write 1.5").split()[0]
    mine = join(namespace)
    maker.kill()
    assert mine.info.id == made
    assert mine.tensor[1].eq(1.5).all()
    successor = User(namespace)
    assert successor.do("look") == f"{made} [1.5]"
    successor.do("close")
    assert mine.tensor[1].eq(1.5).all()
    assert (DIRECTORY / mine.info.handle).exists()
    mine.close()
    successor.end()


def test_what_a_killed_server_left_is_made_anew(namespace):
    dead = User(namespace)
    old = dead.do("write 3.0").split()[0]
    dead.kill()
    mine = join(namespace)
    assert mine.info.id != old
    assert mine.tensor.count_nonzero() == 0
    mine.close()


def test_stale_files_are_removed_and_used_ones_are_not(namespace):
    dead = User(namespace)
    dead.do("look")
    dead.kill()
    used = join(namespace, device="cpu:1")
    assert remove_stale(namespace) == [f"epd_{namespace}_cpu-0_embedding"]
    assert (DIRECTORY / used.info.handle).exists()
    used.close()


def test_joining_and_leaving_at_once_never_splits_the_users(namespace):
    """While one holds the file, its name and its content stay the same, however others come and go."""
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, f"epd_{namespace}_race"], stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    assert [racer.communicate(timeout=30)[1] for racer in racers] == [b""] * 4


def test_closing_leaves_tensors_alone(namespace):
    mine = join(namespace)
    view = mine.tensor[2]
    mine.close()
    mine.close()
    view.fill_(4.0)
    assert view.sum() == 24.0


def test_devices_kinds_and_servers_have_arenas_of_their_own(namespace):
    arenas = [
        join(namespace),
        join(namespace, device="cpu:1"),
        join(namespace, kind="kv", shape=(4, 2, 2, 1, 1, 8)),
        join(f"{namespace}b"),
    ]
    assert len({a.info.id for a in arenas}) == len({a.info.handle for a in arenas}) == 4
    for a in arenas:
        a.close()


def test_an_arena_of_another_shape_is_refused(namespace):
    mine = join(namespace)
    with pytest.raises(ArenaError, match=r"has shape \(4, 2, 3\) and dtype float32, this instance needs \(5, 2, 3\)"):
        join(namespace, shape=(5, 2, 3))
    mine.close()


def test_no_room_is_an_error_that_names_the_remedy(namespace):
    with pytest.raises(ArenaError, match=r"MiB free; lower `embedding.blocks`"):
        join(namespace, shape=(2**40, 2, 3))


def test_a_map_opens_others_arenas_once_and_refuses_those_that_are_gone(namespace):
    mine = join(namespace, dtype=torch.bfloat16)
    arenas = ArenaMap()
    there = arenas.open(mine.info)
    there[3] = 2.0
    assert arenas.open(mine.info) is there
    assert mine.tensor[3].eq(2.0).all()
    arenas.close()

    mine.close()
    with pytest.raises(ArenaError, match="is gone"):
        arenas.open(mine.info)
    again = join(namespace, dtype=torch.bfloat16)
    with pytest.raises(ArenaError, match="was made anew"):
        arenas.open(mine.info)
    again.close()


def test_a_gpus_arena_whose_maker_has_died_is_an_error_that_names_the_remedy(namespace):
    """Others still use its file: it is neither stale nor can it be opened."""
    maker = subprocess.Popen([sys.executable, "-c", ""])
    maker.wait(10)
    info = ArenaInfo("dead", "kv", "cuda:0", f"epd_{namespace}_cuda-0_kv", (4, 1, 2, 16, 1, 8), "float32")
    said = arena_cuda._Descriptor(*msgspec.structs.astuple(info), ipc=bytes(64), pid=maker.pid)
    used = SharedFile.join(info.handle, lambda _: msgspec.msgpack.encode(said))
    for use in (arena_cuda.CudaArena.attach, arena_cuda.CudaArena.join):
        with pytest.raises(
            ArenaError, match=rf"made by process {maker.pid}, which has ended.*; unload all worker models"
        ):
            use(info)
    used.close()


def test_a_maker_that_fails_leaves_nothing(namespace):
    def make(_: int) -> bytes:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        SharedFile.join(f"epd_{namespace}_x", make)
