"""The format cannot change unnoticed: golden vectors, and a reader that knows nothing but docs/format.md."""

from __future__ import annotations

import json
import re
import struct
from hashlib import sha256
from pathlib import Path

import golden_vectors
import pytest
import xxhash

from headstart.block.extent import decode_header, verify_chain
from headstart.block.representation import FORMAT_VERSION, Representation

GOLDEN = Path(__file__).parent / "golden"
SPECIFICATION = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
EXTENTS = {"fixed": golden_vectors.FIXED, "opaque": golden_vectors.OPAQUE}
NAMES = json.loads((GOLDEN / "names.json").read_text())


def golden(name: str) -> bytes:
    """Return the image in a golden file."""
    head, *rows = (GOLDEN / f"extent_{name}.hex").read_text().splitlines()
    image = bytearray(int(head.removeprefix("bytes: ")))
    for row in rows:
        at, data = row.split(": ")
        image[int(at, 16) : int(at, 16) + 32] = bytes.fromhex(data)
    return bytes(image)


def test_names_are_those_of_the_golden_file():
    assert golden_vectors.names() == NAMES


@pytest.mark.parametrize("name", EXTENTS)
def test_extents_are_those_of_the_golden_files(name):
    assert getattr(golden_vectors, f"{name}_extent")() == golden(name)
    assert verify_chain(decode_header(golden(name), EXTENTS[name]))


@pytest.mark.parametrize("name", EXTENTS)
def test_representations_are_read_from_golden_bytes(name):
    assert Representation.decode(bytes.fromhex(NAMES["representations"][name]["encoded"])) == EXTENTS[name]


def test_the_example_in_the_specification_is_the_golden_extent():
    (block,) = re.findall(r"```text golden-extent\n(.*?)```", SPECIFICATION, re.S)
    assert block.strip()
    rows = (GOLDEN / "extent_fixed.hex").read_text().splitlines()
    assert [row for row in block.splitlines() if row not in rows] == []
    assert len(block.splitlines()) == 19


def test_the_names_in_the_specification_are_golden():
    lines = [
        line for block in re.findall(r"```text golden-names\n(.*?)```", SPECIFICATION, re.S) for line in block.splitlines()
    ]
    assert len(lines) == 5
    for line in lines:
        path, value = line.rsplit(maxsplit=1)
        found = NAMES
        for step in path.split(" / "):
            found = found[int(step)] if isinstance(found, list) else found[step.strip()]
        assert found == value


def header_fields(image: bytes) -> dict[str, bytes]:
    """Cut the fixed part of a header by the table in the specification."""
    (section,) = re.findall(r"^### Header\n(.*?)^#", SPECIFICATION, re.S | re.M)
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([^|]+?) \| ", section, re.M)
    fields, at = {}, 0
    for offset, nbytes, name in rows:
        assert int(offset) == at, f"the table has a gap before {name}"
        fields[name] = image[at : at + int(nbytes)]
        at += int(nbytes)
    assert at == 176
    return fields


@pytest.mark.parametrize("name", EXTENTS)
def test_a_reader_written_from_the_specification_alone_reads_an_extent(name):
    """Uses struct, SHA-256 and XXH3 only, and the rules of docs/format.md; nothing of headstart."""
    image = golden(name)
    field = header_fields(image)
    number = {key: int.from_bytes(value, "little") for key, value in field.items() if len(value) <= 8}
    assert field["magic"] == b"HSEXTENT"
    assert number["format version"] == FORMAT_VERSION == 1
    header = image[: number["header bytes"]]
    assert field["header check"] == xxhash.xxh3_128_digest(header[:16] + header[32:])
    digest = field["representation"]
    encoded = bytes.fromhex(NAMES["representations"][name]["encoded"])
    assert digest == sha256(encoded).digest() == bytes.fromhex(NAMES["representations"][name]["digest"])

    blocks, layers = number["blocks"], number["layers"]
    per_piece = number["piece tokens"] // 64
    pieces = blocks // per_piece
    sizes_by_layer = struct.unpack(f"<{layers}I", encoded[-4 * layers :])

    at = 176

    def take(nbytes: int) -> bytes:
        nonlocal at
        at += nbytes
        return header[at - nbytes : at]

    retention = take(-(-number["retention bytes"] // 8) * 8)[: number["retention bytes"]]
    assert retention == {"fixed": b"chat", "opaque": b"default"}[name]
    offsets = struct.unpack(f"<{layers}Q", take(8 * layers))
    keys = [take(32) for _ in range(blocks)]
    tokens = [take(256) for _ in range(blocks)]
    assert bool(number["flags"] & 2) == (0 in sizes_by_layer)
    if number["flags"] & 2:
        flat = struct.unpack(f"<{layers * pieces}I", take(4 * layers * pieces))
        sizes = [flat[layer * pieces :][:pieces] for layer in range(layers)]
    else:
        sizes = [[nbytes] * pieces for nbytes in sizes_by_layer]
    checks = [[take(16) for _ in range(pieces)] for _ in range(layers)]
    extras = [b""] * blocks
    if number["flags"] & 1:
        extras = [take(int.from_bytes(take(4), "little")) for _ in range(blocks)]
    assert sum(map(len, extras)) == number["extras bytes"]
    assert len(header) == -(-at // 4096) * 4096
    assert not any(header[at:])

    key = field["parent"]
    for want, run, extra in zip(keys, tokens, extras, strict=True):
        key = sha256(key + run + extra).digest()
        assert key == want

    end = len(header)
    for layer in range(layers):
        assert offsets[layer] == -(-end // 4096) * 4096
        end = offsets[layer]
        for piece in range(pieces):
            data = image[end : end + sizes[layer][piece]]
            end += len(data)
            bound = digest + keys[(piece + 1) * per_piece - 1] + struct.pack("<I", layer)
            assert checks[layer][piece] == xxhash.xxh3_128_digest(bound + data)
    assert number["state offset"] == -(-end // 4096) * 4096
    assert bool(number["flags"] & 4) == bool(number["state bytes"])
    state = image[number["state offset"] :][: number["state bytes"]]
    if state:
        assert field["state check"] == xxhash.xxh3_128_digest(digest + keys[-1] + b"\xff" * 4 + state)
    assert number["extent bytes"] == len(image) == -(-(number["state offset"] + len(state)) // 4096) * 4096
