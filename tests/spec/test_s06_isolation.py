"""S6 Isolation: different identities or salts never share a key; equal ones always do, in every process."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.block.identity import Identity, canonical_architecture
from headstart.block.keys import BLOCK_TOKENS, Content, chain_keys
from headstart.block.whole import examine
from headstart.testing.fake_kv import IDENTITY, TINY, FakeKV
from headstart.testing.round_trip import hit_tokens, load, save
from headstart.tier.base import ReadRange

ROOT = IDENTITY.root()
TOKENS = list(range(5 * BLOCK_TOKENS))
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "_name_or_path": "some/where",
    "transformers_version": "5.0.0",
}


def digest(text: str) -> bytes:
    return sha256(text.encode()).digest()


# Keys: what goes in decides what comes out, and nothing else does.


def test_keys_of_one_prompt_are_all_different() -> None:
    assert len(set(chain_keys([7] * 640, root=ROOT))) == 10


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=300),
    st.lists(st.integers(0, 2**32 - 1), max_size=300),
    st.integers(0, 300),
)
def test_common_prefix_and_common_keys_are_the_same_thing(a: list[int], b: list[int], shared: int) -> None:
    b = a[:shared] + b
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    keys_a, keys_b = chain_keys(a, root=ROOT), chain_keys(b, root=ROOT)
    assert len(keys_a) == len(a) // BLOCK_TOKENS
    equal = [x == y for x, y in zip(keys_a, keys_b, strict=False)]
    assert equal == [(i + 1) * BLOCK_TOKENS <= common for i in range(len(equal))]


_PARTS = (None, "", "S", "SS")


def test_no_two_combinations_of_extra_parts_share_a_key() -> None:
    """Adapter, version, salt and content with equal text in different places; only an absent and an empty salt are one."""
    seen: dict[bytes, tuple[object, ...]] = {}
    for adapter, version, salt, image in itertools.product(_PARTS, _PARTS, _PARTS, _PARTS):
        identity = replace(IDENTITY, adapters=() if adapter is None else (digest(adapter),), version=version)
        contents = [] if not image else [Content(start=3, tokens=10, digest=image.encode() * 16)]
        key = chain_keys(TOKENS[:64], root=identity.root(), salt=salt, contents=contents)[0]
        what = (adapter, version, salt or None, image or None)
        assert seen.setdefault(key, what) == what
    assert len(seen) == 4 * 4 * 3 * 3


@given(st.binary(min_size=80, max_size=80), st.sets(st.integers(16, 64), min_size=2, max_size=2))
def test_splitting_the_same_bytes_elsewhere_is_another_identity(data: bytes, splits: set[int]) -> None:
    roots = {replace(IDENTITY, weights=data[:n], architecture=data[n:]).root() for n in splits}
    roots |= {replace(IDENTITY, adapters=(data[:n], data[n:])).root() for n in splits}
    roots |= {replace(IDENTITY, adapters=(data[:n],), version=data[n:].hex()).root() for n in splits}
    assert len(roots) == 6


def test_a_secret_crafted_to_continue_another_tenants_name_gives_another_key() -> None:
    names = ["org_1" + "2345", "org_12345" + "\0", "org_1\0" + "2345", "org_1"]
    first = [chain_keys(TOKENS[:64], root=ROOT, salt=name)[0] for name in names]
    assert len(set(first)) == len(names)


def test_an_images_whole_digest_and_its_place_reach_every_key_that_it_touches() -> None:
    digest = bytes(range(32))

    def keys(digest: bytes, start: int = 2) -> list[bytes]:
        return list(chain_keys(TOKENS, root=ROOT, contents=[Content(start=start, tokens=130, digest=digest)]))

    tail, head = digest[:-1] + b"\xff", b"\xff" + digest[1:]
    for other in (keys(tail), keys(head), keys(digest, start=3), list(chain_keys(TOKENS, root=ROOT))):
        assert set(keys(digest)) & set(other) == set()


def test_a_cut_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="16"):
        chain_keys(TOKENS, root=ROOT, contents=[Content(start=0, tokens=1, digest=b"\x12\x34")])


@given(st.integers(0, 6 * BLOCK_TOKENS))
def test_tenants_share_exactly_the_blocks_that_were_declared_shared(shared_tokens: int) -> None:
    a = chain_keys(TOKENS, root=ROOT, salt="a", shared_tokens=shared_tokens)
    b = chain_keys(TOKENS, root=ROOT, salt="b", shared_tokens=shared_tokens)
    shared = min(shared_tokens // BLOCK_TOKENS, len(a))
    assert [x == y for x, y in zip(a, b, strict=True)] == [True] * shared + [False] * (len(a) - shared)
    assert a[:shared] == chain_keys(TOKENS, root=ROOT)[:shared]


def test_keys_are_the_same_in_every_process() -> None:
    """No seed of Python's hash, no load order, no address goes into a key."""
    program = (
        "from headstart.block.identity import Identity\n"
        "from headstart.block.keys import chain_keys\n"
        "identity = Identity(b'm' * 32, b'{}', adapters=(b'B' * 32,))\n"
        "print([k.hex() for k in chain_keys(list(range(192)), root=identity.root(), salt='t')])"
    )
    printed = set()
    for flags, seed in (([], "0"), ([], "42"), (["-R"], "random")):
        done = subprocess.run(
            [sys.executable, *flags, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        printed.add(done.stdout)
    here = chain_keys(list(range(192)), root=Identity(b"m" * 32, b"{}", adapters=(b"B" * 32,)).root(), salt="t")
    assert printed == {f"{[key.hex() for key in here]}\n"}


# Identities: content decides, names do not.


def test_adapters_are_told_apart_by_content_and_order() -> None:
    a, b = b"a" * 32, b"b" * 32
    roots = {replace(IDENTITY, adapters=adapters).root() for adapters in [(), (a,), (b,), (a, b), (b, a), (a, a)]}
    assert len(roots) == 6


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_theta": 500000.0},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"sliding_window": 4096},
        {"num_key_value_heads": 1},
        {"quantization_config": {"bits": 4}},
        {"a_field_nobody_knows_yet": 1},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_setting_that_changes_the_numbers_changes_the_architecture(changed: dict[str, object]) -> None:
    assert canonical_architecture(LLAMA | changed) != canonical_architecture(LLAMA)


def test_a_setting_that_only_names_changes_nothing() -> None:
    renamed = LLAMA | {"_name_or_path": "else/where", "transformers_version": "9"}
    assert canonical_architecture(renamed) == canonical_architecture(LLAMA)
    reordered = json.loads(json.dumps(dict(reversed(LLAMA.items()))))
    assert canonical_architecture(reordered) == canonical_architecture(LLAMA)


# The cache keeps to it, in memory, on disk and after a restart. Each pair is checked the other way too: the owner still hits.

_OTHERS = {
    "weights": {"weights": b"\x22" * 32},
    "architecture": {"architecture": b'{"model_type":"other"}'},
    "adapter": {"adapters": (digest("d1"),)},
    "version": {"version": "2"},
}


@pytest.mark.parametrize("change", _OTHERS.values(), ids=list(_OTHERS))
@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_another_identity_never_hits(shelf, tiers: str, change: dict) -> None:
    mine = FakeKV(TINY, TOKENS)
    theirs = FakeKV(TINY, TOKENS, identity=replace(IDENTITY, **change))
    cache = shelf.open(tiers)
    save(cache, mine)
    assert hit_tokens(cache, theirs) == 0
    assert hit_tokens(cache, mine) == 256
    if tiers != "memory":
        cache = shelf.reopen(tiers)
        assert hit_tokens(cache, theirs) == 0
        assert hit_tokens(cache, mine) == 256


@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_another_salt_never_hits_beyond_what_is_shared(shelf, tiers: str) -> None:
    def tenant(salt: str | None) -> FakeKV:
        return FakeKV(TINY, TOKENS, salt=salt, shared_tokens=128)

    cache = shelf.open(tiers)
    save(cache, tenant("A"))
    for _ in range(2):
        assert [hit_tokens(cache, tenant(salt)) for salt in ("B", None, "A")] == [128, 128, 256]
        found = load(cache, tenant("B"))
        assert (found.usable_tokens, found.wrong) == (128, [])
        if tiers != "memory":
            cache = shelf.reopen(tiers)


def test_a_salt_stands_nowhere_on_the_medium(shelf) -> None:
    salt = "tenant@/\N{DOLPHIN}" * 100
    cache = shelf.open("disk")
    assert save(cache, FakeKV(TINY, TOKENS, salt=salt)).stored_tokens == 320
    shelf.close()
    names = [path.relative_to(shelf.directory) for path in shelf.directory.rglob("*")]
    assert names
    for name in names:
        assert str(name).isascii()
        assert len(name.name) <= 120
        file = shelf.directory / name
        assert not file.is_file() or b"tenant@/" not in file.read_bytes()


def test_weights_updated_in_place_make_everything_stored_before_a_miss(shelf) -> None:
    def at(version: str) -> FakeKV:
        return FakeKV(TINY, TOKENS, identity=replace(IDENTITY, version=version))

    cache = shelf.open("both")
    save(cache, at("1"))
    assert (hit_tokens(cache, at("1")), hit_tokens(cache, at("2"))) == (256, 0)
    assert hit_tokens(shelf.reopen("both"), at("2")) == 0


# Contents: what stands behind placeholder tokens counts as the tokens do.

IMAGE = Content(start=100, tokens=90, digest=digest("an image"))  # in blocks 1 and 2


def pictured(*contents: Content) -> FakeKV:
    return FakeKV(TINY, [*range(1, 65), *[9] * 336], contents=contents)


@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
@pytest.mark.parametrize(
    ("contents", "hit"),
    [
        ([IMAGE], 384),
        ([], 64),
        ([replace(IMAGE, digest=digest("another image"))], 64),
        ([replace(IMAGE, start=101)], 64),
        ([replace(IMAGE, tokens=91)], 64),
        ([IMAGE, Content(start=192, tokens=1, digest=digest("another image"))], 192),
        ([Content(start=320, tokens=64, digest=digest("an image"))], 64),
    ],
    ids=["equal", "none", "another", "moved", "longer", "one more", "elsewhere"],
)
def test_equal_tokens_with_other_contents_never_share(shelf, tiers: str, contents: list[Content], hit: int) -> None:
    cache = shelf.open(tiers)
    assert save(cache, pictured(IMAGE)).stored_tokens == 384
    for _ in range(2):
        found = load(cache, pictured(*contents))
        assert (found.usable_tokens, found.wrong) == (hit, [])
        if tiers == "disk":
            cache = shelf.reopen(tiers)


def test_contents_are_kept_beside_the_tokens_so_that_keys_can_be_followed(shelf) -> None:
    cache = shelf.open("disk")
    save(cache, pictured(IMAGE))
    (tier,) = shelf.tiers
    (info,) = tier.scan()
    image = memoryview(bytearray(info.extent_bytes))
    assert tier.lease([info.id]) == [True]
    tier.read([ReadRange(info.id, 0, [image])])
    tier.release([info.id])
    assert [bool(extras) for extras in examine(image, TINY).extras] == [False, True, True, False, False, False]


def test_contents_and_salt_together_are_found_by_the_same_two_alone(shelf) -> None:
    cache = shelf.open("disk")
    kv = FakeKV(TINY, range(700), salt="a", contents=[IMAGE, replace(IMAGE, start=500)])
    save(cache, kv)
    assert load(cache, kv).usable_tokens == 640
    assert hit_tokens(cache, FakeKV(TINY, range(700), salt="b", contents=kv.contents)) == 0
    assert hit_tokens(cache, FakeKV(TINY, range(700), contents=kv.contents)) == 0
    assert hit_tokens(cache, FakeKV(TINY, range(700), salt="a", contents=kv.contents[:1])) == 448


def test_many_contents_that_make_a_header_longer_still_fit(shelf) -> None:
    """An extent is cut so that it fits with what stands beside its tokens."""
    cache = shelf.open_small("disk")  # segments of 1 MiB
    contents = [Content(start=8 * n, tokens=8, digest=digest(f"{n}") * 3) for n in range(120 * 8)]
    kv = FakeKV(TINY, range(120 * 64 + 1), contents=contents)
    assert save(cache, kv).reason is None
    found = load(cache, kv)
    assert (found.usable_tokens, found.wrong) == (120 * 64, [])
