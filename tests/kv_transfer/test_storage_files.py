"""Files of KV blocks: an entry is whole or absent, whoever writes, fails, dies or reads."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kv_support import kv_cache_config

from interlock.core.errors import KVTransferError
from interlock.kv_transfer.connectors.block_files import BlockFiles

CONFIG = kv_cache_config()
SIZE = CONFIG.num_layers * CONFIG.block_bytes
ROOM = 1 << 30


def key_of(number):
    return number.to_bytes(32, "little")


def payload_of(number):
    return random.Random(number).randbytes(SIZE)


def all_files(root):
    return sorted(path for path in root.rglob("*") if path.is_file())


class Publishing(BlockFiles):
    """The negative control: written under its final name."""

    @staticmethod
    def temporary_path(path):
        return path

    @staticmethod
    def publish(temporary, path):
        pass


class OneStagingName(BlockFiles):
    """The negative control: all writers of a key use one temporary name."""

    @staticmethod
    def temporary_path(path):
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        return temporary


def test_what_was_written_is_read(tmp_path):
    files = BlockFiles(tmp_path, CONFIG, ROOM)
    assert not files.contains(key_of(1))
    with pytest.raises(FileNotFoundError):
        files.read(key_of(1))
    files.write(key_of(1), payload_of(1))
    assert files.contains(key_of(1))
    assert bytes(files.read(key_of(1))) == payload_of(1)
    assert files.used_bytes() == files.file_bytes


def test_an_entry_is_kept_unless_it_is_to_be_replaced(tmp_path):
    files = BlockFiles(tmp_path, CONFIG, ROOM)
    files.write(key_of(1), payload_of(1))
    files.write(key_of(1), payload_of(2))
    assert bytes(files.read(key_of(1))) == payload_of(1)
    files.write(key_of(1), payload_of(2), replace=True)
    assert bytes(files.read(key_of(1))) == payload_of(2)
    assert len(all_files(tmp_path)) == 1


@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: d + b"x", lambda d: b"", lambda d: bytes([d[0] ^ 1]) + d[1:]])
@pytest.mark.parametrize("flip", [0, 20, 60, 100, 120, -1])
def test_any_doubt_is_a_miss_and_the_entry_goes(tmp_path, damage, flip):
    files = BlockFiles(tmp_path, CONFIG, ROOM)
    files.write(key_of(1), payload_of(1))
    path = files.path(key_of(1))
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[flip] ^= 1
    for bad in (bytes(flipped), damage(good)):
        path.write_bytes(bad)
        with pytest.raises(KVTransferError, match="not a whole block"):
            files.read(key_of(1))
        assert not path.exists()


def test_an_entry_of_another_key_or_namespace_is_a_miss(tmp_path):
    files = BlockFiles(tmp_path, CONFIG, ROOM)
    other = BlockFiles(tmp_path, kv_cache_config(identity="kv-b"), ROOM)
    files.write(key_of(1), payload_of(1))
    assert not other.contains(key_of(1))
    for path in (files.path(key_of(2)), other.path(key_of(1))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files.path(key_of(1)).read_bytes())
    for reader, number in ((files, 2), (other, 1)):
        with pytest.raises(KVTransferError, match="not a whole block"):
            reader.read(key_of(number))


def interleave(first, second):
    """A writes all; B opens its file and writes half; A publishes; B fails with EIO. Returns after both have ended."""
    half_written, published = threading.Event(), threading.Event()
    plain_write, plain_publish = first.write_bytes, first.publish
    errors = []

    def write_half(fd, data):
        if len(data) == SIZE:
            plain_write(fd, data[: SIZE // 2])
            half_written.set()
            assert published.wait(60)
            raise OSError(5, "Input/output error")
        plain_write(fd, data)

    def publish_late(temporary, path):
        second_writer.start()
        assert half_written.wait(60)
        plain_publish(temporary, path)
        published.set()

    def write_second():
        try:
            second.write(key_of(1), payload_of(1))
        except OSError as error:
            errors.append(error.errno)

    second_writer = threading.Thread(target=write_second)
    first.publish, second.write_bytes = publish_late, write_half
    first.write(key_of(1), payload_of(1))
    second_writer.join()
    assert errors == [5]


def test_a_writer_that_fails_changes_nothing_of_anothers_entry(tmp_path):
    files = BlockFiles(tmp_path, CONFIG, ROOM)
    interleave(BlockFiles(tmp_path, CONFIG, ROOM), BlockFiles(tmp_path, CONFIG, ROOM))
    assert bytes(files.read(key_of(1))) == payload_of(1)
    assert all_files(tmp_path) == [files.path(key_of(1))]


def test_with_one_staging_name_the_other_writers_half_is_published(tmp_path):
    interleave(OneStagingName(tmp_path, CONFIG, ROOM), OneStagingName(tmp_path, CONFIG, ROOM))
    with pytest.raises((KVTransferError, OSError)):
        BlockFiles(tmp_path, CONFIG, ROOM).read(key_of(1))


@pytest.mark.parametrize(("writer_class", "is_seen"), [(BlockFiles, False), (Publishing, True)], ids=["renamed", "written in place"])
def test_a_half_written_entry_is_not_visible(tmp_path, writer_class, is_seen):
    writer = writer_class(tmp_path, CONFIG, ROOM)
    seen = []

    def write_half(fd, data):
        os.write(fd, data[: len(data) // 2])
        seen.append(writer.path(key_of(1)).exists())
        os.write(fd, data[len(data) // 2 :])

    writer.write_bytes = write_half
    writer.write(key_of(1), payload_of(1))
    assert any(seen) == is_seen
    assert bytes(BlockFiles(tmp_path, CONFIG, ROOM).read(key_of(1))) == payload_of(1)


HALF_WRITER = """
import os, sys, time
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from test_storage_files import BlockFiles, CONFIG, ROOM, SIZE, key_of, payload_of
files = BlockFiles(Path(sys.argv[2]), CONFIG, ROOM)
def write_half(fd, data):
    os.write(fd, data[: len(data) // 2])
    if len(data) == SIZE:
        print("half", flush=True)
        sys.stdin.read()
files.write_bytes = write_half
files.write(key_of(1), payload_of(1))
"""


def test_a_killed_writer_leaves_nothing_visible_and_its_rest_is_cleaned(tmp_path):
    files = BlockFiles(tmp_path, CONFIG, ROOM)
    arguments = [sys.executable, "-c", HALF_WRITER, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"half\n"
        (leftover,) = all_files(tmp_path)
        files.clean()
        assert all_files(tmp_path) == [leftover], "its writer lives"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not files.contains(key_of(1))
        files.clean()
    assert all_files(tmp_path) == []


RANDOM_WRITER = """
import random, sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from test_storage_files import BlockFiles, CONFIG, KVTransferError, key_of, payload_of
files = BlockFiles(Path(sys.argv[2]), CONFIG, int(sys.argv[3]))
choice = random.Random(int(sys.argv[4]))
for _ in range(200):
    number = choice.randrange(100)
    files.write(key_of(number), payload_of(number), replace=choice.random() < 0.3)
"""


@pytest.mark.parametrize("num_files", [1000, 20], ids=["roomy", "evicting"])
def test_no_reader_ever_sees_a_short_block_of_two_writing_processes(tmp_path, num_files):
    files = BlockFiles(tmp_path, CONFIG, ROOM)
    bound = num_files * files.file_bytes
    arguments = [sys.executable, "-c", RANDOM_WRITER, str(Path(__file__).parent), str(tmp_path), str(bound)]
    writers = [subprocess.Popen([*arguments, str(seed)]) for seed in (1, 2)]
    choice, num_read = random.Random(3), 0
    while num_read < 20 or any(writer.poll() is None for writer in writers):
        number = choice.randrange(100)
        try:
            assert bytes(files.read(key_of(number))) == payload_of(number)
            num_read += 1
        except FileNotFoundError:
            continue
    assert [writer.wait() for writer in writers] == [0, 0]
    assert all(path.stat().st_size == files.file_bytes for path in all_files(tmp_path))
    files.max_bytes = bound
    files.write(key_of(1000), payload_of(1000))
    assert files.used_bytes() <= bound


def test_the_least_recently_used_go_first_and_the_bound_holds_after_each_write(tmp_path):
    files = BlockFiles(tmp_path, CONFIG, 0)
    files.max_bytes = 8 * files.file_bytes
    for number in range(8):
        files.write(key_of(number), payload_of(number))
        os.utime(files.path(key_of(number)), (1000 + number, 1000 + number))
    os.utime(files.path(key_of(0)), (2000, 2000))
    for number in range(8, 11):
        files.write(key_of(number), payload_of(number))
        assert files.used_bytes() <= files.max_bytes
    assert files.contains(key_of(0))
    assert not files.contains(key_of(1))
    assert all(files.contains(key_of(number)) for number in (7, 8, 9, 10))


def foreign_places(files):
    """Where others may have files: beside ours, in our directories, and with names and places that are almost ours."""
    path = files.path(key_of(0xAB))
    temporary = files.temporary_path(path)
    root, namespace, group = path.parents[2], path.parents[1], path.parent
    return [
        *(place / name for place in (root.parent, root, namespace, group) for name in ("thesis.tmp", "x.kv", ".x.kv.1.2.tmp")),
        *(
            place / name
            for place in (
                root.parent,
                root,
                namespace,
                root.parent / namespace.name / group.name,
                root / "not-a-namespace" / group.name,
                root / namespace.name.upper() / group.name,
                namespace / "deep",
                namespace / "AB",
                namespace / "cd",
                group / group.name,
            )
            for name in (path.name, temporary.name)
        ),
        group / (path.name + ".tmp"),
        group / (path.name + "\n"),
        group / path.name.replace("a", "A"),
        group / path.name[1:],
        group / temporary.name[1:],
        group / temporary.name.replace(f".{os.getpid()}.", ".x."),
    ]


def put(path, size):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (1, 1))


def fill(files):
    """Write five times what fits."""
    for number in range(40):
        files.write(key_of(number), payload_of(number))
        assert files.used_bytes() <= files.max_bytes


def small(tmp_path):
    files = BlockFiles(tmp_path, CONFIG, 0)
    files.max_bytes = 8 * files.file_bytes
    return files


def test_files_of_others_are_neither_removed_nor_counted(tmp_path):
    files = small(tmp_path)
    foreign = foreign_places(files)
    for path in foreign:
        put(path, files.file_bytes)
    files.clean()
    assert files.used_bytes() == 0
    fill(files)
    assert files.used_bytes() >= 6 * files.file_bytes, "those of others take no room"
    files.clean()
    assert [path for path in foreign if not path.exists()] == []


def test_leftovers_and_entries_of_all_namespaces_are_cleaned_and_evicted(tmp_path):
    files, other = small(tmp_path), BlockFiles(tmp_path, kv_cache_config(identity="kv-b"), ROOM)
    leftovers = [each.temporary_path(each.path(key_of(1))) for each in (files, other)]
    for path in [*leftovers, other.path(key_of(1))]:
        put(path, files.file_bytes)
    assert files.used_bytes() == 3 * files.file_bytes
    files.clean()
    assert all_files(tmp_path) == [other.path(key_of(1))]
    fill(files)
    assert not other.contains(key_of(1))


@pytest.mark.parametrize("depth", [2, 1, 0], ids=["root", "namespace", "group"])
def test_a_symbolic_link_to_a_directory_is_not_followed(tmp_path, depth):
    elsewhere, files = BlockFiles(tmp_path / "elsewhere", CONFIG, ROOM), small(tmp_path / "ours")
    elsewhere.write(key_of(1), payload_of(1))
    put(elsewhere.temporary_path(elsewhere.path(key_of(1))), 10)
    before = {path: path.stat().st_mtime_ns for path in all_files(tmp_path / "elsewhere")}
    link = files.path(key_of(1)).parents[depth]
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere.path(key_of(1)).parents[depth])
    files.clean()
    files.remove(key_of(1))
    assert files.used_bytes() == 0
    assert not files.contains(key_of(1))
    for attempt in (lambda: files.read(key_of(1)), lambda: files.write(key_of(1), payload_of(2))):
        with pytest.raises(OSError, match="symbolic link") as caught:
            attempt()
        assert caught.value.errno == errno.ELOOP
    assert {path: path.stat().st_mtime_ns for path in all_files(tmp_path / "elsewhere")} == before


def test_a_symbolic_link_in_the_place_of_an_entry_or_a_leftover_is_not_followed(tmp_path):
    files, victim = small(tmp_path), tmp_path / "victim"
    put(victim, files.file_bytes)
    path = files.path(key_of(100))
    path.parent.mkdir(parents=True)
    links = [path, files.temporary_path(path)]
    for link in links:
        link.symlink_to(victim)
    files.clean()
    assert files.used_bytes() == 0
    assert not files.contains(key_of(100))
    with pytest.raises(OSError, match="symbolic links"):
        files.read(key_of(100))
    fill(files)
    assert all(link.is_symlink() for link in links)
    assert victim.stat().st_mtime == 1


def test_an_entry_that_is_evicted_while_it_is_looked_at_is_written(tmp_path):
    files = BlockFiles(tmp_path, CONFIG, ROOM)
    files.contains = lambda key: True
    files.write(key_of(1), payload_of(1))
    assert bytes(files.read(key_of(1))) == payload_of(1)


def test_reading_an_entry_marks_it_as_used(tmp_path):
    files = BlockFiles(tmp_path, CONFIG, ROOM)
    files.write(key_of(1), payload_of(1))
    os.utime(files.path(key_of(1)), (1000, 1000))
    files.read(key_of(1))
    assert files.path(key_of(1)).stat().st_mtime > 1000


def test_files_are_readable_by_their_owner_alone(tmp_path):
    files = BlockFiles(tmp_path, CONFIG, ROOM)
    files.write(key_of(1), payload_of(1))
    path = files.path(key_of(1))
    assert [part.stat().st_mode & 0o077 for part in (path, path.parent, path.parent.parent)] == [0, 0, 0]
