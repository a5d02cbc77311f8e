"""The key chain: equal beginnings and nothing else give equal keys."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from array import array
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.block import keys as keys_module
from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS, KEY_BYTES, Content, block_extras, chain_keys, packed_keys
from headstart.block.native import native_chain
from headstart.policy.routing.holders import keys_of, packed_keys_of

ROOT = Identity(weights=b"w" * 32, architecture=b"{}").root()
DIGEST = bytes(range(32))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=300)


@given(TOKENS)
def test_only_full_blocks_have_keys(tokens):
    keys = chain_keys(tokens, root=ROOT)
    assert len(keys) == len(tokens) // BLOCK_TOKENS
    assert all(len(key) == KEY_BYTES for key in keys)


@given(
    st.lists(st.integers(0, 1), min_size=100, max_size=260),
    st.lists(st.integers(0, 1), min_size=100, max_size=260),
    st.integers(0, 260),
)
def test_keys_are_common_exactly_as_far_as_tokens_are(one, other, shared):
    other = one[:shared] + other[shared:]
    equal_tokens = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    pairs = zip(chain_keys(one, root=ROOT), chain_keys(other, root=ROOT), strict=False)
    assert [a == b for a, b in pairs] == [
        (i + 1) * BLOCK_TOKENS <= equal_tokens for i in range(min(len(one), len(other)) // BLOCK_TOKENS)
    ]


@given(TOKENS)
def test_every_kind_of_sequence_gives_the_same_keys(tokens):
    want = chain_keys(tokens, root=ROOT)
    for same in (
        tuple(tokens),
        array("I", tokens),
        array("Q", tokens),
        np.array(tokens, np.uint32),
        np.array(tokens, np.int64),
        np.array(tokens, ">u4"),
        np.array([tokens, tokens], np.uint32).T[:, 0],  # not contiguous
        [np.int64(token) for token in tokens],
    ):
        assert chain_keys(same, root=ROOT) == want


@given(TOKENS, st.integers(0, 4), st.integers(0, 130), st.integers(0, 200), st.integers(1, 150))
def test_a_chain_can_be_continued_at_any_block(tokens, blocks, shared_tokens, start, length):
    cut = min(blocks, len(tokens) // BLOCK_TOKENS) * BLOCK_TOKENS
    whole = chain_keys(tokens, root=ROOT, salt="s", shared_tokens=shared_tokens, contents=[Content(start, length, DIGEST)])
    if not cut:
        return
    salted_already = shared_tokens // BLOCK_TOKENS < cut // BLOCK_TOKENS
    rest = chain_keys(
        tokens[cut:],
        root=whole[cut // BLOCK_TOKENS - 1],
        salt=None if salted_already else "s",
        shared_tokens=max(0, shared_tokens - cut),
        contents=[Content(start - cut, length, DIGEST)],
    )
    assert rest == whole[cut // BLOCK_TOKENS :]


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [1.5],
        ["1"],
        [None],
        b"\0" * 256,
        bytearray(256),
        "text",
        np.array([-1]),
        np.array([2**32]),
        np.array([1.0]),
        np.array([True]),
        np.zeros((2, 64), np.uint32),
        array("i", [-1]),
        [1] * 64 + [-1],  # in the remainder too, though it has no key
    ],
)
def test_what_is_no_token_id_is_refused(tokens):
    with pytest.raises(ValueError, match="token id"):
        chain_keys(tokens, root=ROOT)


@pytest.mark.parametrize("root", [b"", b"x" * 31, b"x" * 33])
def test_a_root_of_another_size_is_refused(root):
    with pytest.raises(ValueError, match="root"):
        chain_keys([1], root=root)


@pytest.mark.parametrize("salt", [0, 7, False, ["a"], bytearray(b"a")])
def test_a_salt_that_is_neither_text_nor_bytes_is_refused(salt):
    with pytest.raises(ValueError, match="salt"):
        chain_keys(range(64), root=bytes(32), salt=salt)


def test_wrong_contents_and_counts_are_refused():
    with pytest.raises(ValueError, match="digest"):
        Content(start=0, tokens=1, digest=b"short")
    with pytest.raises(ValueError, match="tokens"):
        Content(start=0, tokens=0, digest=DIGEST)
    with pytest.raises(ValueError, match="shared_tokens"):
        chain_keys([1] * 64, root=ROOT, salt="s", shared_tokens=-1)


def test_what_tells_requests_apart_never_gives_an_equal_key():
    """Adapter, version, salt, image and embeddings drawn from like-looking values; only an absent and an empty salt are one."""
    names = (None, "", "S", "SS")
    digests = {None: None, "": b"", "S": b"S", "SS": b"SS"}
    tokens = [7] * BLOCK_TOKENS
    seen: dict[bytes, tuple] = {}
    for adapter, version, salt, image, embeds in itertools.product((None, "S", "SS"), names, names, names, names):
        identity = Identity(
            weights=b"w",
            architecture=b"a",
            adapters=() if adapter is None else (digests[adapter],),
            version=version,
        )
        contents = [
            Content(start, 10, sha256(name.encode()).digest()) for start, name in ((0, image), (20, embeds)) if name is not None
        ]
        (key,) = chain_keys(tokens, root=identity.root(), salt=salt, contents=contents)
        case = (adapter, version, salt or None, image, embeds)
        assert seen.setdefault(key, case) == case
    assert len(seen) == 3 * 4 * 3 * 4 * 4


@given(st.text(max_size=6), st.text(max_size=6))
def test_salts_share_a_key_only_if_they_are_equal(one, other):
    tokens = [1] * BLOCK_TOKENS
    assert (chain_keys(tokens, root=ROOT, salt=one) == chain_keys(tokens, root=ROOT, salt=other)) == (one == other)


def test_a_salt_of_bytes_is_its_text_in_utf8_and_odd_text_is_a_salt_too():
    tokens = [1] * BLOCK_TOKENS
    assert chain_keys(tokens, root=ROOT, salt="Zoë") == chain_keys(tokens, root=ROOT, salt="Zoë".encode())
    assert chain_keys(tokens, root=ROOT, salt="\ud800") != chain_keys(tokens, root=ROOT)


@pytest.mark.parametrize(
    ("shared_tokens", "equal"), [(0, 0), (1, 0), (63, 0), (64, 1), (100, 1), (128, 2), (192, 3), (256, 4), (9999, 4)]
)
def test_tenants_share_exactly_the_blocks_wholly_inside_the_shared_prefix(shared_tokens, equal):
    tokens = list(range(256))
    plain = chain_keys(tokens, root=ROOT)
    one = chain_keys(tokens, root=ROOT, salt="one", shared_tokens=shared_tokens)
    other = chain_keys(tokens, root=ROOT, salt="other", shared_tokens=shared_tokens)
    assert [a == b == c for a, b, c in zip(one, other, plain, strict=True)] == [i < equal for i in range(4)]
    assert not set(one[equal:]) & set(other[equal:])


def test_the_salt_stands_nowhere_in_the_clear():
    salt = "a very secret salt @/😀" * 40
    extras = block_extras(0, salt=salt, shared_tokens=0, contents=())
    assert salt.encode() not in extras
    assert len(extras) == 5 + 32


def test_the_whole_digest_of_a_content_counts():
    tokens = [5] * 128
    base = bytes(range(32))
    for at in range(32):
        other = bytearray(base)
        other[at] ^= 1
        one = chain_keys(tokens, root=ROOT, contents=[Content(2, 100, base)])
        two = chain_keys(tokens, root=ROOT, contents=[Content(2, 100, bytes(other))])
        assert one[0] != two[0]
        assert one[1] != two[1]


@pytest.mark.parametrize(("one", "other"), [(2, 3), (2, 66), (0, 64), (63, 64)])
def test_the_same_content_elsewhere_gives_another_key(one, other):
    tokens = [5] * 256
    keys = [chain_keys(tokens, root=ROOT, contents=[Content(start, 50, DIGEST)]) for start in (one, other)]
    changed = min(one, other) // BLOCK_TOKENS
    assert keys[0][:changed] == keys[1][:changed]
    assert not set(keys[0][changed:]) & set(keys[1][changed:])


def test_a_content_enters_every_block_it_touches_and_the_order_given_does_not_matter():
    contents = [Content(60, 70, DIGEST), Content(61, 2, bytes(16)), Content(130, 1, b"x" * 20)]
    touched = [bool(block_extras(block, salt=None, shared_tokens=0, contents=contents[:1])) for block in range(4)]
    assert touched == [True, True, True, False]
    tokens = list(range(256))
    assert len({tuple(chain_keys(tokens, root=ROOT, contents=order)) for order in itertools.permutations(contents)}) == 1


@given(
    st.lists(st.builds(Content, st.integers(-100, 300), st.integers(1, 200), st.binary(min_size=16, max_size=20)), max_size=4),
    st.sampled_from([None, "", "s"]),
    st.integers(0, 300),
)
def test_extras_and_tokens_are_all_that_a_key_hashes(contents, salt, shared_tokens):
    tokens = list(range(256))
    keys = chain_keys(tokens, root=ROOT, salt=salt, shared_tokens=shared_tokens, contents=contents)
    key = ROOT
    for block in range(4):
        packed = np.array(tokens[64 * block : 64 * block + 64], "<u4").tobytes()
        extras = block_extras(block, salt=salt, shared_tokens=shared_tokens, contents=contents)
        key = sha256(key + packed + extras).digest()
        assert keys[block] == key


@pytest.mark.parametrize("seed", ["0", "42", "random"])
def test_keys_are_the_same_in_every_process(seed):
    program = (
        "from headstart.block.identity import Identity\n"
        "from headstart.block.keys import chain_keys\n"
        "root = Identity(weights=b'w' * 32, architecture=b'{}').root()\n"
        "print(chain_keys(range(64), root=root, salt='s')[0].hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    answer = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == chain_keys(range(64), root=ROOT, salt="s")[0].hex()


@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize("blocks", [0, 1, 4, 5, 77])
def test_c_and_hashlib_make_the_same_keys(monkeypatch: pytest.MonkeyPatch, blocks: int, salt: str | None) -> None:
    if native_chain() is None:
        pytest.skip("headstart was installed without its C, or the processor has no instructions for SHA-256")
    tokens = np.random.default_rng(blocks).integers(0, 2**32, 64 * blocks + 7).astype(np.uint32)
    contents = [Content(start=64 * 7 + 3, tokens=200, digest=DIGEST)]
    made = [chain_keys(tokens, root=ROOT, salt=salt, shared_tokens=64 * 5, contents=some) for some in ([], contents)]
    monkeypatch.setattr(keys_module, "native_chain", lambda: None)
    assert made == [chain_keys(tokens, root=ROOT, salt=salt, shared_tokens=64 * 5, contents=some) for some in ([], contents)]
    assert all(len(keys) == blocks for keys in made)


@pytest.mark.parametrize("root", [b"", b"r", b"r" * 31, b"r" * 40], ids=len)
def test_a_chain_behind_any_root_is_what_hashlib_makes(monkeypatch: pytest.MonkeyPatch, root: bytes) -> None:
    data = np.arange(64 * 9, dtype="<u4").tobytes()
    made = keys_module.chain(root, data)
    monkeypatch.setattr(keys_module, "native_chain", lambda: None)
    assert made == keys_module.chain(root, data)


def test_a_library_that_makes_other_keys_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        class headstart_chain:
            def __new__(cls, *arguments: object) -> None:  # type: ignore[misc]  # hashes nothing, as on another processor
                return None

    monkeypatch.setattr("ctypes.CDLL", lambda path: Library)
    native_chain.cache_clear()
    try:
        assert native_chain() is None
    finally:
        native_chain.cache_clear()


@given(TOKENS, st.integers(0, 130))
def test_packed_keys_are_the_same_ones_behind_the_other(tokens, shared_tokens):
    keys = chain_keys(tokens, root=ROOT, salt="s", shared_tokens=shared_tokens)
    packed = packed_keys(tokens, root=ROOT, salt="s", shared_tokens=shared_tokens)
    assert packed == b"".join(keys)
    assert packed_keys_of(packed).tolist() == keys_of(keys).tolist()
